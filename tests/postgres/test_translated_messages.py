"""What servers say in other languages, after the translations of PostgreSQL 15, and of others where these differ."""

from __future__ import annotations

import pytest

from pg_cdc_source.postgres.translated_messages import with_english

SAID = {
    "authentication failed": """
        de  Passwort-Authentifizierung für Benutzer »a« fehlgeschlagen
        de  LDAP-Authentifizierung für Benutzer »a« fehlgeschlagen
        de  Zertifikatauthentifizierung für Benutzer »a« fehlgeschlagen
        es  la autentificación password falló para el usuario «a»
        es  la autentificación LDAP falló para el usuario «a»
        es  la autentificación por certificado falló para el usuario «a»
        fr  authentification par mot de passe échouée pour l'utilisateur « a »
        fr  authentification LDAP échouée pour l'utilisateur « a »
        fr  authentification par le certificat échouée pour l'utilisateur « a »
        it  autenticazione con password fallita per l'utente "a"
        it  Autenticazione LDAP fallita per l'utente "a"
        it  autenticazione con certificato fallita per l'utente "a"
        ja  ユーザー"a"のパスワード認証に失敗しました
        ja  ユーザー"a"のLDAP認証に失敗しました
        ja  ユーザー"a"の証明書認証に失敗しました
        ka  პაროლით ავთენტიფიკაცია მომხმარებლისთვის "a" ვერ მოხერხდა
        ka  LDAP ავთენტიფიკაცია მომხმარებლისთვის "a" ვერ მოხერხდა
        ka  რადიუსით ავთენტიფიკაცია მომხმარებლისთვის "a" ვერ მოხერხდა
        ka  სერტიფიკატით ავთენტიფიკაცია მომხმარებლისთვის "a" ვერ მოხერხდა
        ko  사용자 "a"의 password 인증을 실패했습니다
        ko  "a" 사용자의 LDAP 인증을 실패했습니다.
        ko  사용자 "a"의 인증서 인증을 실패했습니다
        ru  пользователь "a" не прошёл проверку подлинности (по паролю)
        ru  пользователь "a" не прошёл проверку подлинности (LDAP)
        ru  пользователь "a" не прошёл проверку подлинности (по сертификату)
        sv  Lösenordsautentisering misslyckades för användare "a"
        sv  LDAP-autentisering misslyckades för användare "a"
        sv  certifikat-autentisering misslyckades för användare "a"
        uk  користувач "a" не пройшов автентифікацію за допомогою пароля
        uk  Користувач "a" не пройшов автентифікацію LDAP
        uk  користувач "a" не пройшов автентифікацію за сертифікатом
        zh_CN  用户 "a" 的密码认证失败
        zh_CN  用户 "a" 的 LDAP 认证失败
        zh_CN  用户 "a" 的证书认证失败
        zh_TW  密碼驗證使用者 "a" 失敗
        zh_TW  LDAP 驗證使用者 "a" 失敗
        zh_TW  憑證驗證使用者 "a" 失敗
        pt_BR  autenticação do tipo password falhou para usuário "a"
        pl  autoryzacja hasłem nie powiodła się dla użytkownika "a"
        tr  "a" kullanıcısı için şifre doğrulaması başarısız oldu
        tr  "a" kullanıcısı için LDAP kimlik doğrulaması başarısız
    """,
    "does not exist": """
        de  Rolle »a« existiert nicht
        de  Datenbank »a« existiert nicht
        es  no existe el rol «a»
        es  no existe la base de datos «a»
        fr  le rôle « a » n'existe pas
        fr  la base de données « a » n'existe pas
        it  il ruolo "a" non esiste
        it  il database "a" non esiste
        ja  ロール"a"は存在しません
        ja  データベース"a"は存在しません
        ka  როლი არ არსებობს: "a"
        ka  მონაცემთა ბაზა "a" არ არსებობს
        ko  "a" 롤(role) 없음
        ko  "a" 데이터베이스 없음
        ru  роль "a" не существует
        ru  база данных "a" не существует
        sv  rollen "a" finns inte
        sv  databasen "a" existerar inte
        uk  роль "a" не існує
        uk  бази даних "a" не існує
        zh_CN  角色 "a" 不存在
        zh_CN  数据库 "a" 不存在
        zh_TW  角色 "a" 不存在
        zh_TW  資料庫 "a" 不存在
        pt_BR  banco de dados "a" não existe
        pl  rola "a" nie istnieje
        tr  "a" rolü mevcut değil
    """,
    "is not permitted to log in": """
        de  Rolle »a« hat keine Berechtigung zum Einloggen
        es  al rol «a» no se le permite conectarse
        fr  le rôle « a » n'est pas autorisé à se connecter
        it  al ruolo "a" non è consentito effettuare il login
        ja  ロール"a"はログインが許可されません
        ka  როლს შესვლის უფლება არ აქვს: a
        ko  "a" 롤은 접속을 허용하지 않음
        ru  для роли "a" вход запрещён
        sv  roll "a" tillåts inte logga in
        uk  для ролі "a" вхід не дозволений
        zh_CN  不允许角色 "a" 进行登录
        zh_TW  不允許角色 "a" 登入
        pt_BR  role "a" não tem permissão para entrar
        pl  rola "a" nie zezwala na logowanie
        tr  "a" rolünun sisteme giriş hakkı yoktur
    """,
    "too many clients": """
        de  tut mir leid, schon zu viele Verbindungen
        es  lo siento, ya tenemos demasiados clientes
        fr  désolé, trop de clients sont déjà connectés
        it  spiacente, troppi client già connessi
        ja  現在クライアント数が多すぎます
        ka  უკაცრავად, უკვე მეტისმეტად ბევრი კლიენტია
        ko  최대 동시 접속자 수를 초과했습니다.
        ru  извините, уже слишком много клиентов
        sv  ledsen, för många klienter
        uk  вибачте, вже забагато клієнтів
        zh_CN  客户端连接过多
        zh_TW  抱歉，客戶端過多
        de  zu viele Verbindungen für Datenbank »a«
        de  zu viele Verbindungen von Rolle »a«
        es  demasiadas conexiones para la base de datos «a»
        es  demasiadas conexiones para el rol «a»
        fr  trop de connexions pour la base de données « a »
        fr  trop de connexions pour le rôle « a »
        it  troppe connessioni al database "a"
        it  troppe connessioni per il ruolo "a"
        ja  データベース"a"への接続が多すぎます
        ja  ロール"a"からの接続が多すぎます
        ka  ძალიან ბევრი კავშირი ბაზისთვის "a"
        ka  მეტისმეტად ბევრი კავშირი როლისთვის "a"
        ko  "a" 데이터베이스 최대 접속수를 초과했습니다
        ko  "a" 롤의 최대 동시 접속수를 초과했습니다
        ru  слишком много подключений к БД "a"
        ru  слишком много подключений для роли "a"
        sv  för många uppkopplingar till databasen "a"
        sv  för många uppkopplingar för roll "a"
        uk  занадто багато підключень до бази даних "a"
        uk  занадто багато підключень для ролі "a"
        zh_CN  数据库 "a" 的连接过多
        zh_CN  角色 "a" 的连接过多
        zh_TW  資料庫 "a" 的連線太多
        zh_TW  角色 "a" 的連線太多
        pt_BR  desculpe, muitos clientes conectados
        pl  przepraszamy, mamy już zbyt wiele klientów
        tr  üzgünüm, istemci sayısı çok fazla
        pt_BR  muitas conexões para role "a"
        pl  zbyt wiele połączeń do bazy "a"
        tr  "a" rol bağlantı sayısı aşılmıştır
    """,
    "remaining connection slots": """
        de  die verbleibenden Verbindungen sind für Superuser auf Nicht-Replikationsverbindungen reserviert
        es  las conexiones restantes están reservadas a superusuarios y no de replicación
        fr  les emplacements de connexions restants sont réservés pour les connexions superutilisateur
        it  i rimanenti slot di connessione sono riservati a connessioni di superutenti non di replica
        ja  残りの接続スロットはレプリケーションユーザーではないスーパーユーザー用に予約されています
        ko  남은 연결 슬롯은 non-replication 슈퍼유저 연결용으로 남겨 놓았음
        ru  оставшиеся слоты подключений зарезервированы для подключений суперпользователя (не для репликации)
        sv  resterande anslutningsslottar är reserverade för superuser-anslutningar utan replikering
        uk  слоти підключень, які залишились, зарезервовані для підключень суперкористувача (не для реплікації)
        zh_CN  剩余连接槽位保留给超级用户的非复制连接
        zh_TW  剩餘的連線槽保留給非複寫的超級使用者連線
        pl  pozostałe gniazda połączeń są zarezerwowane dla niereplikacyjnych połączeń superużytkowników
        ja  残りの接続枠は5属性を持つロールのために予約されています
        uk  слоти підключення, що залишилися, зарезервовані для ролей з атрибутом 5
        de  die verbleibenden Verbindungen sind für Rollen mit dem 5-Attribut reserviert
        tr  kalan bağlantı sayısı, replikasyon dışındaki superuser bağlantıları için ayrıldı
    """,
    "to start WAL sender": """
        de  nur Superuser und Replikationsrollen können WAL-Sender starten
        es  debe ser superusuario o rol de replicación para iniciar el walsender
        fr  doit être un superutilisateur ou un rôle ayant l'attribut de réplication pour exécuter walsender
        it  solo un superutente o il ruolo di replica può avviare walsender
        ja  walsenderを起動するにはスーパーユーザーまたはreplicationロールである必要があります
        ko  superuser 또는 replication 권한을 가진 롤만 walsender 프로세스를 시작할 수 있음
        ru  для запуска процесса walsender требуется роль репликации или права суперпользователя
        sv  måste vara superuser eller replikeringsroll för att starta "walsender"
        uk  для запуску процесу walsender потребується роль реплікації або бути суперкористувачем
        zh_CN  必须是超级用户或复制角色才能启动 walsender
        zh_TW  必須是超級使用者或複寫角色才能啟動 walsender
        de  keine Berechtigung, um WAL-Sender zu starten
        es  se ha denegado el permiso para iniciar “WAL sender”
        ja  WAL送信プロセスを開始する権限がありません
        ko  WAL 송신기 시작할 권한 없음
        ru  нет прав для запуска процесса, передающего WAL
        sv  rättighet saknas för att starta WAL-skickare
        uk  немає дозволу для запуску відправника WAL
        pt_BR  deve ser super-usuário ou role de replicação para iniciar walsender
    """,
    "system is shutting down": """
        de  das Datenbanksystem fährt herunter
        es  el sistema de base de datos está apagándose
        fr  le système de base de données s'arrête
        it  il database si sta spegnendo
        ja  データベースシステムはシャットダウンしています
        ka  მონაცემთა ბაზის სისტემა ითიშება
        ko  데이터베이스 시스템이 중지 중입니다
        ru  система баз данных останавливается
        sv  databassystemet stänger ner
        uk  система бази даних завершує роботу
        zh_CN  数据库系统正在关闭
        zh_TW  資料庫系統正在關閉
    """,
}
CASES = [(english, *line.split(maxsplit=1)) for english, lines in SAID.items() for line in lines.strip().splitlines()]


@pytest.mark.parametrize(("english", "language", "text"), CASES)
def test_a_translation_is_recognised(english: str, language: str, text: str) -> None:
    # Lines are broken in some.
    for said in (text, text.replace(" ", "\n", 1)):
        assert with_english(f"FATAL:  {said}") == f"FATAL:  {said}\n{english}"


def test_other_texts_stay_as_they_are() -> None:
    for text in ("FATAL:  das Datenbanksystem startet", "the server closed the connection", ""):
        assert with_english(text) == text
