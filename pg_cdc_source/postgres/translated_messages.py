"""Recognise what servers say in other languages than English while a session is opened (``lc_messages``).

libpq gives no SQLSTATE for a connection that failed, so its text has to tell.
"""

from __future__ import annotations

# Of each text in English, what stands in its translations: src/backend/po/*.po of PostgreSQL. Texts that name a
# setting or a file, as max_wal_senders and pg_hba.conf, do so in every language.
_TRANSLATIONS = {
    "authentication failed": """
        uthentifizierung für Benutzer
        la autentificación
        authentification par
        authentification PAM
        authentification LDAP
        authentification RADIUS
        authentification GSSAPI
        utenticazione con
        認証に失敗
        Autenticazione PAM fallita
        Autenticazione LDAP fallita
        Autenticazione RADIUS fallita
        认证失败
        utenticazione GSSAPI fallita
        ავთენტიფიკაცია მომხმარებლისთვის
        인증을 실패
        не прошёл проверку подлинности
        autentisering misslyckades
        не пройшов автентифікацію
        驗證使用者
        autenticação do tipo
        nie powiodła się dla użytkownika
        doğrulaması başarısız
    """,
    "does not exist": """
        existiert nicht
        no existe
        n'existe pas
        non esiste
        は存在しません
        არ არსებობს
        롤(role) 없음
        데이터베이스 없음
        не существует
        finns inte
        existerar inte
        не існує
        不存在
        não existe
        nie istnieje
        mevcut değil
    """,
    "is not permitted to log in": """
        keine Berechtigung zum Einloggen
        no se le permite conectarse
        n'est pas autorisé à se connecter
        non è consentito effettuare il login
        ログインが許可されません
        შესვლის უფლება არ აქვს
        접속을 허용하지 않음
        вход запрещён
        tillåts inte logga in
        вхід не дозволений
        进行登录
        登入
        não tem permissão para entrar
        nie zezwala na logowanie
        sisteme giriş hakkı yoktur
    """,
    "to start WAL sender": """
        WAL-Sender starten
        iniciar el walsender
        exécuter walsender
        avviare walsender
        walsenderを起動する
        walsender 프로세스를 시작
        для запуска процесса walsender
        för att starta "walsender"
        для запуску процесу walsender
        启动 walsender
        啟動 walsender
        iniciar walsender
        uruchomić walsender
        um WAL-Sender zu starten
        iniciar “WAL sender”
        WAL送信プロセスを開始する権限
        WAL 송신기 시작
        для запуска процесса, передающего WAL
        starta WAL-skickare
        запуску відправника WAL
    """,
    "too many clients": """
        zu viele Verbindungen
        demasiados clientes
        demasiadas conexiones
        trop de clients
        trop de connexions
        troppi client
        troppe connessioni
        クライアント数が多すぎます
        接続が多すぎます
        ძალიან ბევრი კავშირი
        მეტისმეტად ბევრი კ
        동시 접속
        최대 접속수를 초과
        слишком много клиентов
        слишком много подключений
        för många klienter
        för många uppkopplingar
        забагато клієнтів
        занадто багато підключень
        连接过多
        連線太多
        客戶端過多
        muitos clientes conectados
        muitas conexões
        zbyt wiele klientów
        zbyt wiele połączeń
        istemci sayısı çok fazla
        bağlantı sayısı aşılmıştır
    """,
    "remaining connection slots": """
        verbleibenden Verbindungen
        conexiones restantes
        connexions restants
        rimanenti slot di connessione
        残りの接続スロット
        남은 연결 슬롯
        оставшиеся слоты подключений
        resterande anslutningsslottar
        слоти підключень, які залишились
        剩余连接槽位
        剩餘的連線槽
        conexão remanescentes
        pozostałe gniazda połączeń
        kalan bağlantı sayısı
        残りの接続枠
        слоти підключення, що залишилися
    """,
    "system is shutting down": """
        das Datenbanksystem fährt herunter
        el sistema de base de datos está apagándose
        le système de base de données s'arrête
        il database si sta spegnendo
        データベースシステムはシャットダウンしています
        მონაცემთა ბაზის სისტემა ითიშება
        데이터베이스 시스템이 중지 중입니다
        система баз данных останавливается
        databassystemet stänger ner
        система бази даних завершує роботу
        数据库系统正在关闭
        資料庫系統正在關閉
    """,
}
_PARTS = {english: [part.strip() for part in parts.strip().splitlines()] for english, parts in _TRANSLATIONS.items()}


def with_english(text: str) -> str:
    """Return a message with the English texts behind it that it is a translation of."""
    plain = " ".join(text.split())
    found = [english for english, parts in _PARTS.items() if any(part in plain for part in parts)]
    return "\n".join((text, *found))
