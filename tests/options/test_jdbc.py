from __future__ import annotations

import pytest
from given_options import keywords

from pg_cdc_source.options.jdbc import IGNORED_PARAMETERS


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("jdbc:postgresql:db", {"host": "localhost", "port": "5432", "dbname": "db"}),
        ("jdbc:postgresql://", {"host": "localhost", "port": "5432"}),
        ("jdbc:postgresql:///db", {"host": "localhost", "port": "5432", "dbname": "db"}),
        ("jdbc:postgresql://h/", {"host": "h", "port": "5432"}),
        ("jdbc:postgresql://h:1/db?", {"host": "h", "port": "1", "dbname": "db"}),
        ("jdbc:postgresql://h1:1,h2/db", {"host": "h1,h2", "port": "1,5432", "dbname": "db"}),
        ("jdbc:postgresql://[::1]:5/db", {"host": "::1", "port": "5", "dbname": "db"}),
        ("jdbc:postgresql://h/d%20b%2B", {"host": "h", "port": "5432", "dbname": "d b+"}),
        ("jdbc:postgresql:?user=x", {"host": "localhost", "port": "5432", "user": "x"}),
        # A service says where its server is.
        ("jdbc:postgresql:?service=s", {"service": "s"}),
        ("jdbc:postgresql:///db?service=s", {"dbname": "db", "service": "s"}),
        ("jdbc:postgresql://h/?service=s", {"host": "h", "service": "s"}),
        ("jdbc:postgresql://:5/db?service=s", {"port": "5", "dbname": "db", "service": "s"}),
    ],
)
def test_the_address_of_a_jdbc_url_is_what_pgjdbc_makes_of_it(url: str, expected: dict[str, str]) -> None:
    assert keywords(url=url) == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("user=a+b&password=p%2Bq%26%3D", {"user": "a b", "password": "p+q&="}),
        ("ssl", {"sslmode": "verify-full"}),
        ("ssl=true", {"sslmode": "verify-full"}),
        ("ssl=true&sslmode=require", {"sslmode": "require"}),
        ("ssl=false", {}),
        ("connectTimeout=5", {"connect_timeout": "5"}),
        ("loginTimeout=7", {"connect_timeout": "7"}),
        ("loginTimeout=7&connectTimeout=5", {"connect_timeout": "5"}),
        ("currentSchema=app", {"options": "-csearch_path=app"}),
        ('currentSchema=app,"My%20S"', {"options": '-csearch_path=app,"My\\ S"'}),
        ("options=-c%20work_mem=1MB&currentSchema=a", {"options": "-c work_mem=1MB -csearch_path=a"}),
        ("targetServerType=any", {}),
        ("targetServerType=preferSecondary", {"target_session_attrs": "prefer-standby"}),
        ("loadBalanceHosts=false", {}),
        ("channelBinding=require&kerberosServerName=pg", {"channel_binding": "require", "krbsrvname": "pg"}),
        ("sslcert=c.pem&sslkey=k.pem&sslpassword=s", {"sslcert": "c.pem", "sslkey": "k.pem", "sslpassword": "s"}),
        ("ApplicationName=etl&socketTimeout=30&prepareThreshold=0&tcpKeepAlive=true", {}),
        ("&".join(sorted(IGNORED_PARAMETERS)), {}),
    ],
)
def test_parameters_of_a_jdbc_url_become_libpq_keywords(query: str, expected: dict[str, str]) -> None:
    address = {"host": "h", "port": "5432", "dbname": "d"}
    assert keywords(url=f"jdbc:postgresql://h/d?{query}") == {**address, **expected}
