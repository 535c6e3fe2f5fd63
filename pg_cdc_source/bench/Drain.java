// Reads a replication slot through Debezium's engine until so many changes have come, and prints what that took.
//
//   PGPASSWORD=... java -cp 'jars/*' Drain.java HOST PORT USER DATABASE SLOT PUBLICATION CHANGES
//
// The clock runs from the first change to the last: neither the JVM's start nor the engine's is counted. Records stay
// Connect's objects: no time goes into JSON.

import io.debezium.embedded.Connect;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.RecordChangeEvent;
import io.debezium.engine.format.ChangeEventFormat;
import java.lang.management.ManagementFactory;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.apache.kafka.connect.source.SourceRecord;

public class Drain {
    static long first, last, cpuFirst, cpuLast, count;

    static long cpu() {
        return ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
    }

    public static void main(String[] a) throws Exception {
        long wanted = Long.parseLong(a[6]);
        Properties p = new Properties();
        p.setProperty("name", "bench");
        p.setProperty("connector.class", "io.debezium.connector.postgresql.PostgresConnector");
        p.setProperty("offset.storage", "org.apache.kafka.connect.storage.MemoryOffsetBackingStore");
        p.setProperty("offset.flush.interval.ms", "10000");
        p.setProperty("database.hostname", a[0]);
        p.setProperty("database.port", a[1]);
        p.setProperty("database.user", a[2]);
        p.setProperty("database.password", System.getenv("PGPASSWORD"));
        p.setProperty("database.dbname", a[3]);
        p.setProperty("topic.prefix", "bench");
        p.setProperty("plugin.name", "pgoutput");
        p.setProperty("slot.name", a[4]);
        p.setProperty("publication.name", a[5]);
        p.setProperty("publication.autocreate.mode", "disabled");
        p.setProperty("snapshot.mode", "no_data");
        // Larger than the defaults (2,048 and 8,192), which makes it faster.
        p.setProperty("max.batch.size", "16384");
        p.setProperty("max.queue.size", "65536");
        p.setProperty("poll.interval.ms", "50");

        CountDownLatch done = new CountDownLatch(1);
        DebeziumEngine<RecordChangeEvent<SourceRecord>> engine = DebeziumEngine.create(ChangeEventFormat.of(Connect.class))
            .using(p)
            .using((success, message, error) -> {
                if (!success) {
                    System.err.println(message);
                    if (error != null) error.printStackTrace();
                }
                done.countDown();
            })
            .notifying((List<RecordChangeEvent<SourceRecord>> records,
                        DebeziumEngine.RecordCommitter<RecordChangeEvent<SourceRecord>> committer) -> {
                if (count == 0) {
                    first = System.nanoTime();
                    cpuFirst = cpu();
                }
                for (RecordChangeEvent<SourceRecord> record : records) {
                    // Not a tombstone, which follows each delete.
                    if (record.record().value() != null) count++;
                    committer.markProcessed(record);
                }
                committer.markBatchFinished();
                if (count >= wanted) {
                    last = System.nanoTime();
                    cpuLast = cpu();
                    done.countDown();
                }
            })
            .build();
        ExecutorService executor = Executors.newSingleThreadExecutor();
        executor.execute(engine);
        done.await();
        engine.close();
        executor.shutdownNow();
        if (last == 0) System.exit(1);
        System.out.printf(java.util.Locale.ROOT, "{\"rows\": %d, \"wall_s\": %.3f, \"client_cpu_s\": %.3f}%n",
            count, (last - first) / 1e9, (cpuLast - cpuFirst) / 1e9);
        System.exit(0);
    }
}
