// Follows a replication slot with Flink CDC into Iceberg tables, one for each table of PostgreSQL, all within this JVM.
//
//   PGPASSWORD=... java -cp 'jars/*:classes' FlinkMirror HOST PORT USER DATABASE SLOT PUBLICATION \
//     WAREHOUSE CHANGES TABLE...
//
// With 0 changes the tables are created in the warehouse, and their first rows are read. Otherwise the job begins where
// the slot stands, and is stopped with a savepoint, which commits what has come, when so many changes have. The clock
// runs from the submission of the job to its end. What the tables hold then is printed: for each its rows and a sum of
// their hashes.

import com.sun.management.OperatingSystemMXBean;
import java.io.File;
import java.lang.management.ManagementFactory;
import java.math.BigDecimal;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.time.Instant;
import java.time.OffsetDateTime;
import java.time.temporal.ChronoUnit;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.cdc.connectors.base.options.StartupOptions;
import org.apache.flink.cdc.connectors.postgres.source.PostgresSourceBuilder;
import org.apache.flink.cdc.connectors.postgres.table.PostgreSQLDeserializationConverterFactory;
import org.apache.flink.cdc.connectors.shaded.org.apache.kafka.connect.data.Struct;
import org.apache.flink.cdc.connectors.shaded.org.apache.kafka.connect.source.SourceRecord;
import org.apache.flink.cdc.debezium.DebeziumDeserializationSchema;
import org.apache.flink.cdc.debezium.table.DebeziumChangelogMode;
import org.apache.flink.cdc.debezium.table.RowDataDebeziumDeserializeSchema;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.core.execution.JobClient;
import org.apache.flink.core.execution.SavepointFormatType;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.runtime.typeutils.InternalTypeInfo;
import org.apache.flink.table.types.logical.RowType;
import org.apache.flink.util.Collector;
import org.apache.iceberg.PartitionSpec;
import org.apache.iceberg.Schema;
import org.apache.iceberg.Table;
import org.apache.iceberg.catalog.TableIdentifier;
import org.apache.iceberg.data.IcebergGenerics;
import org.apache.iceberg.data.Record;
import org.apache.iceberg.flink.FlinkSchemaUtil;
import org.apache.iceberg.flink.TableLoader;
import org.apache.iceberg.flink.sink.FlinkSink;
import org.apache.iceberg.hadoop.HadoopCatalog;
import org.apache.iceberg.io.CloseableIterable;
import org.apache.iceberg.types.Types.DecimalType;
import org.apache.iceberg.types.Types.IntegerType;
import org.apache.iceberg.types.Types.LongType;
import org.apache.iceberg.types.Types.NestedField;
import org.apache.iceberg.types.Types.StringType;
import org.apache.iceberg.types.Types.TimestampType;

public class FlinkMirror {
    static final int PARALLELISM = 2;
    static final Schema SCHEMA = new Schema(
        List.of(
            NestedField.required(1, "id", LongType.get()),
            NestedField.optional(2, "customer", LongType.get()),
            NestedField.optional(3, "quantity", IntegerType.get()),
            NestedField.optional(4, "price", DecimalType.of(12, 2)),
            NestedField.optional(5, "note", StringType.get()),
            NestedField.optional(6, "changed", TimestampType.withZone())),
        Set.of(1));
    static final RowType ROW = FlinkSchemaUtil.convert(SCHEMA);

    // All tasks run in this JVM.
    static final AtomicLong came = new AtomicLong();

    /** The rows as Flink SQL's postgres-cdc makes them, each with its table's name. */
    static class Changes implements DebeziumDeserializationSchema<Tuple2<String, RowData>> {
        final RowDataDebeziumDeserializeSchema rows = RowDataDebeziumDeserializeSchema.newBuilder()
            .setPhysicalRowType(ROW)
            .setResultTypeInfo(InternalTypeInfo.of(ROW))
            .setUserDefinedConverterFactory(PostgreSQLDeserializationConverterFactory.instance())
            .setChangelogMode(DebeziumChangelogMode.UPSERT)
            .build();

        @Override
        public void deserialize(SourceRecord record, Collector<Tuple2<String, RowData>> out) throws Exception {
            String table = ((Struct) record.value()).getStruct("source").getString("table");
            rows.deserialize(record, new Collector<RowData>() {
                @Override
                public void collect(RowData row) {
                    out.collect(Tuple2.of(table, row));
                }

                @Override
                public void close() {}
            });
            came.incrementAndGet();
        }

        @Override
        public TypeInformation<Tuple2<String, RowData>> getProducedType() {
            return Types.TUPLE(Types.STRING, InternalTypeInfo.of(ROW));
        }
    }

    public static void main(String[] a) throws Exception {
        String warehouse = a[6];
        long changes = Long.parseLong(a[7]);
        List<String> tables = List.of(a).subList(8, a.length);
        HadoopCatalog catalog = new HadoopCatalog(new org.apache.hadoop.conf.Configuration(), warehouse);
        if (changes == 0) {
            for (String table : tables) {
                Map<String, String> properties = Map.of("format-version", "2");
                catalog.createTable(name(table), SCHEMA, PartitionSpec.unpartitioned(), properties);
            }
        }
        StreamExecutionEnvironment job = job(a, changes, catalog, tables);

        long began = System.nanoTime(), cpu = cpu();
        if (changes == 0) {
            job.execute();
        } else {
            JobClient client = job.executeAsync();
            while (came.get() < changes && !client.getJobStatus().get().isGloballyTerminalState()) Thread.sleep(20);
            if (came.get() >= changes) {
                String savepoints = new File(warehouse, "savepoints").toURI().toString();
                client.stopWithSavepoint(false, savepoints, SavepointFormatType.NATIVE).get();
            }
            client.getJobExecutionResult().get();
        }
        double wall = (System.nanoTime() - began) / 1e9, used = (cpu() - cpu) / 1e9;

        List<String> held = new ArrayList<>();
        for (String table : tables) held.add(held(catalog.loadTable(name(table))));
        System.out.printf(java.util.Locale.ROOT,
            "{\"rows\": %d, \"wall_s\": %.3f, \"client_cpu_s\": %.3f, \"tables\": [%s]}%n",
            came.get(), wall, used, String.join(", ", held));
        System.exit(0);
    }

    static StreamExecutionEnvironment job(String[] a, long changes, HadoopCatalog catalog, List<String> tables) {
        Configuration settings = new Configuration();
        settings.setString("execution.checkpointing.interval", "10 s");
        settings.setString("execution.checkpointing.dir", new File(a[6], "checkpoints").toURI().toString());
        settings.setString("restart-strategy.type", "none");
        // Else each row would be copied for each of the tables.
        settings.setString("pipeline.object-reuse", "true");
        StreamExecutionEnvironment job = StreamExecutionEnvironment.createLocalEnvironment(PARALLELISM, settings);

        Properties debezium = new Properties();
        debezium.setProperty("publication.name", a[5]);
        debezium.setProperty("publication.autocreate.mode", "disabled");
        DataStream<Tuple2<String, RowData>> rows = job.fromSource(
            PostgresSourceBuilder.PostgresIncrementalSource.<Tuple2<String, RowData>>builder()
                .hostname(a[0])
                .port(Integer.parseInt(a[1]))
                .username(a[2])
                .password(System.getenv("PGPASSWORD"))
                .database(a[3])
                .schemaList("public")
                .tableList(tables.stream().map(table -> "public." + table).toArray(String[]::new))
                .slotName(a[4])
                .decodingPluginName("pgoutput")
                .debeziumProperties(debezium)
                .startupOptions(changes == 0 ? StartupOptions.snapshot() : StartupOptions.committed())
                // Nothing changes while the first rows are read.
                .skipSnapshotBackfill(true)
                .deserializer(new Changes())
                .build(),
            WatermarkStrategy.noWatermarks(),
            "slot");
        for (String table : tables) {
            Table target = catalog.loadTable(name(table));
            DataStream<RowData> its = rows.filter(row -> row.f0.equals(table))
                .map(row -> row.f1).returns(InternalTypeInfo.of(ROW));
            FlinkSink.forRowData(its)
                .table(target)
                .tableLoader(TableLoader.fromHadoopTable(target.location()))
                .equalityFieldColumns(List.of("id"))
                .upsert(changes > 0)
                .uidPrefix(table)
                .append();
        }
        return job;
    }

    static TableIdentifier name(String table) {
        return TableIdentifier.of("flink", table);
    }

    static long cpu() {
        return ((OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
    }

    /** How many rows a table has, and the sum of the first four bytes of their MD5, as JSON. */
    static String held(Table table) throws Exception {
        MessageDigest md5 = MessageDigest.getInstance("MD5");
        long count = 0, sum = 0;
        try (CloseableIterable<Record> rows = IcebergGenerics.read(table).build()) {
            for (Record row : rows) {
                long micros = ChronoUnit.MICROS.between(Instant.EPOCH, (OffsetDateTime) row.getField("changed"));
                String text = row.getField("id") + "|" + row.getField("customer") + "|" + row.getField("quantity") + "|"
                    + ((BigDecimal) row.getField("price")).toPlainString() + "|" + row.getField("note") + "|" + micros;
                byte[] hash = md5.digest(text.getBytes(StandardCharsets.UTF_8));
                sum += Integer.toUnsignedLong(ByteBuffer.wrap(hash).getInt());
                count++;
            }
        }
        return "[" + count + ", " + sum + "]";
    }
}
