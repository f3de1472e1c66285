import java.io.PrintStream;
import java.math.BigDecimal;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Instant;
import java.time.LocalDateTime;
import java.time.ZoneId;
import java.time.ZoneOffset;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.StringJoiner;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.table.api.EnvironmentSettings;
import org.apache.flink.table.api.TableEnvironment;
import org.apache.flink.types.Row;
import org.apache.flink.types.RowKind;
import org.apache.flink.util.CloseableIterator;

/**
 * What Flink's SQL gives, as a stream, in a cluster of this process: `FlinkOracle TABLES FOLDER`.
 *
 * TABLES is a file with statements, one a line. FOLDER has queries, each in a file NAME.sql; the rows that stand in the
 * end go to NAME.rows, as JSON arrays with their fields as text, times in ms. Where rows have a key, Flink may not say which
 * one an update replaces: the last of a key stands.
 */
public class FlinkOracle {
    public static void main(String[] args) throws Exception {
        Configuration configuration = new Configuration();
        configuration.setString("parallelism.default", "1");
        TableEnvironment tables = TableEnvironment.create(
            EnvironmentSettings.newInstance().inStreamingMode().withConfiguration(configuration).build());
        tables.getConfig().setLocalTimeZone(ZoneId.of("UTC"));
        for (String statement : Files.readAllLines(Path.of(args[0]))) tables.executeSql(statement);
        try (var files = Files.newDirectoryStream(Path.of(args[1]), "*.sql")) {
            for (Path query : files) answer(tables, query);
        }
    }

    private static void answer(TableEnvironment tables, Path query) throws Exception {
        Map<String, Integer> standing = new LinkedHashMap<>();
        try (CloseableIterator<Row> rows = tables.executeSql(Files.readString(query)).collect()) {
            while (rows.hasNext()) {
                Row row = rows.next();
                boolean comes = row.getKind() == RowKind.INSERT || row.getKind() == RowKind.UPDATE_AFTER;
                standing.merge(text(row), comes ? 1 : -1, Integer::sum);
            }
        }
        Path to = Path.of(query.toString().replace(".sql", ".rows"));
        try (PrintStream out = new PrintStream(Files.newOutputStream(to), false, StandardCharsets.UTF_8)) {
            standing.forEach((row, count) -> {
                for (int i = 0; i < count; i++) out.println(row);
            });
        }
    }

    private static String text(Row row) {
        StringJoiner fields = new StringJoiner(",", "[", "]");
        for (int i = 0; i < row.getArity(); i++) {
            Object field = row.getField(i);
            if (field instanceof LocalDateTime at) field = at.toInstant(ZoneOffset.UTC).toEpochMilli();
            else if (field instanceof Instant at) field = at.toEpochMilli();
            else if (field instanceof BigDecimal number) field = number.stripTrailingZeros().toPlainString();
            fields.add(field == null ? "null" : "\"" + field.toString().replace("\\", "\\\\").replace("\"", "\\\"") + "\"");
        }
        return fields.toString();
    }
}
