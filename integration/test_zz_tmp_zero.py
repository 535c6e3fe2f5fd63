import sys
sys.path.insert(0,'/work/main/integration')
from frames import load
def test_zero(db, pg, spark):
    with pg.cursor() as c:
        c.execute("CREATE TABLE t (); INSERT INTO t DEFAULT VALUES; INSERT INTO t DEFAULT VALUES")
    df = load(spark, db, dbtable="t")
    print(df.schema)
    print("COUNT", df.count())
    print("ROWS", df.collect())
