/* The inner loops of reading, in C. native.py calls them where this file was compiled.
 *
 * Each function does what the NumPy code beside its caller does, but only for ordinary input. For anything else it
 * returns 1, and the caller runs the NumPy code over the same input, which decodes the value or raises the error. So
 * every rule has one home, which is the NumPy code.
 *
 * - No Python API is used: calls run without the interpreter's lock, and one build serves every Python version.
 * - Every position is checked against the end of its row before anything is read there.
 */

#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for little-endian machines; without this, NumPy does the work"
#endif
#define EXPORT __attribute__((visibility("default")))

static inline uint16_t big16(const uint8_t *at) { return (uint16_t)(at[0] << 8 | at[1]); }

static inline uint32_t big32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return __builtin_bswap32(value);
}

static inline uint64_t big64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return __builtin_bswap64(value);
}

/* --- receiving ---------------------------------------------------------------------------------------------------- */

typedef int (*get_copy_data)(void *connection, char **buffer, int async);
typedef void (*free_memory)(void *memory);
typedef int (*consume_input)(void *connection);

struct drained {
    int64_t messages; /* how many lie in the buffer now */
    int64_t bytes;
    char *waiting; /* a message that was not added; the caller frees it */
    int64_t result; /* of the last PQgetCopyData: the length of `waiting`; 0, -1 and -2 mean what they mean in libpq */
};

/* Receive messages of a COPY into `data`, one behind the other, until there are `most`, one does not fit, or none
 * comes. `ends` gets the end of each. With `tags`, stop before the first message whose byte at `tag_at` is not marked
 * there. The next call goes on from where `drained` says that this one stopped.
 */
EXPORT void pgcdc_drain(void *connection, get_copy_data get, free_memory release, int async, const uint8_t *tags,
                        int64_t tag_at, uint8_t *data, int64_t capacity, int64_t *ends, int64_t most,
                        struct drained *drained) {
    drained->result = 1;
    while (drained->messages < most) {
        char *message = NULL;
        const int length = get(connection, &message, async);
        drained->result = length;
        if (length <= 0) return;
        if (length > capacity - drained->bytes ||
            (tags && (length <= tag_at || message[0] != 'w' || !tags[(uint8_t)message[tag_at]]))) {
            drained->waiting = message;
            return;
        }
        memcpy(data + drained->bytes, message, (size_t)length);
        release(message);
        drained->bytes += length;
        ends[drained->messages++] = drained->bytes;
    }
}

/* Wait for messages and receive them as pgcdc_drain does, until that stops for another reason than that none has come.
 * A server sends a few kilobytes at a time. A reader that waits for each of these is woken thousands of times a second,
 * and so is the server. So when nothing is left, let `pause_ns` pass before waiting.
 */
EXPORT void pgcdc_drain_all(void *connection, get_copy_data get, free_memory release, consume_input consume, int socket,
                            int64_t pause_ns, uint8_t *data, int64_t capacity, int64_t *ends, int64_t most,
                            struct drained *drained) {
    struct pollfd readable = {.fd = socket, .events = POLLIN};
    const struct timespec pause = {.tv_sec = 0, .tv_nsec = pause_ns};
    for (int paused = 0;;) {
        const int64_t before = drained->messages;
        pgcdc_drain(connection, get, release, 1, NULL, 0, data, capacity, ends, most, drained);
        if (drained->result != 0) return;
        if (drained->messages > before) paused = 0;
        if (poll(&readable, 1, 0) > 0) {
            if (!consume(connection)) {
                drained->result = -2;
                return;
            }
        } else if (!paused) {
            nanosleep(&pause, NULL);
            paused = 1;
        } else {
            /* libpq waits, because it knows of bytes that TLS has decrypted but not yet handed out. */
            const int64_t one_more = drained->messages + 1;
            pgcdc_drain(connection, get, release, 0, NULL, 0, data, capacity, ends, one_more, drained);
            if (drained->waiting || drained->result < 0 || drained->messages == most) return;
            paused = 0;
        }
    }
}

/* --- rows of COPY ------------------------------------------------------------------------------------------------- */

struct column {
    int64_t width; /* of every value; 0: it varies */
    void *values; /* with a width: the values in this machine's byte order, 0 for NULL */
    int64_t *start; /* without one: where they lie */
    int64_t *length; /* 0 for NULL */
    uint8_t *valid;
    int64_t nulls;
};

/* Find the values of rows of COPY (manual, "Binary Format"). Returns 0, or 1 where a row is malformed. */
EXPORT int pgcdc_walk_copy(const uint8_t *data, const int64_t *starts, const int64_t *ends, int64_t rows,
                           struct column *columns, int64_t count) {
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = starts[row];
        const int64_t end = ends[row];
        if (end - at < 2 || big16(data + at) != count) return 1;
        at += 2;
        for (int64_t i = 0; i < count; i++) {
            struct column *column = &columns[i];
            if (end - at < 4) return 1;
            const int32_t length = (int32_t)big32(data + at);
            at += 4;
            if (length < 0) {
                if (length != -1) return 1;
                column->valid[row] = 0;
                column->nulls++;
                switch (column->width) {
                case 0:
                    column->start[row] = at;
                    column->length[row] = 0;
                    break;
                case 1: ((uint8_t *)column->values)[row] = 0; break;
                case 2: ((uint16_t *)column->values)[row] = 0; break;
                case 4: ((uint32_t *)column->values)[row] = 0; break;
                case 8: ((uint64_t *)column->values)[row] = 0; break;
                default: memset((uint8_t *)column->values + row * column->width, 0, (size_t)column->width);
                }
                continue;
            }
            if (length > end - at || (column->width && length != column->width)) return 1;
            column->valid[row] = 1;
            switch (column->width) {
            case 0:
                column->start[row] = at;
                column->length[row] = length;
                break;
            case 1: ((uint8_t *)column->values)[row] = data[at]; break;
            case 2: ((uint16_t *)column->values)[row] = big16(data + at); break;
            case 4: ((uint32_t *)column->values)[row] = big32(data + at); break;
            case 8: ((uint64_t *)column->values)[row] = big64(data + at); break;
            default: memcpy((uint8_t *)column->values + row * column->width, data + at, (size_t)length);
            }
            at += length;
        }
        if (at != end) return 1;
    }
    return 0;
}

/* --- rows of pgoutput --------------------------------------------------------------------------------------------- */

struct tuple_column {
    int64_t *start;
    int64_t *length; /* 0 where there is no text */
    uint8_t *valid; /* the text was sent */
    uint8_t *unchanged; /* the value is TOASTed and was not sent */
    int64_t without_text; /* how many are not valid */
    int64_t not_sent; /* how many are unchanged */
};

/* Find the values of images of rows (manual, "TupleData") that begin at `starts`, which are moved behind them. Returns
 * 0, or 1 where an image is malformed.
 */
EXPORT int pgcdc_walk_tuples(const uint8_t *data, int64_t *starts, const int64_t *ends, int64_t rows,
                             struct tuple_column *columns, int64_t count) {
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = starts[row];
        const int64_t end = ends[row];
        if (end - at < 2 || big16(data + at) != count) return 1;
        at += 2;
        for (int64_t i = 0; i < count; i++) {
            struct tuple_column *column = &columns[i];
            if (end - at < 1) return 1;
            const uint8_t form = data[at++];
            int64_t length = 0;
            if (form == 't') {
                if (end - at < 4) return 1;
                length = (int32_t)big32(data + at);
                at += 4;
                if (length < 0 || length > end - at) return 1;
            } else if (form == 'u') {
                column->not_sent++;
                column->without_text++;
            } else if (form == 'n') {
                column->without_text++;
            } else {
                return 1;
            }
            column->start[row] = at;
            column->length[row] = length;
            column->valid[row] = form == 't';
            column->unchanged[row] = form == 'u';
            at += length;
        }
        starts[row] = at;
    }
    return 0;
}

/* Copy messages into `out`, one behind the other from `used` on, each without its `cut` bytes at `at`, which every
 * message has. `out_ends` gets the end of each.
 */
EXPORT void pgcdc_copy_without(const uint8_t *data, const int64_t *starts, const int64_t *ends, int64_t rows, int64_t at,
                               int64_t cut, uint8_t *out, int64_t used, int64_t *out_ends) {
    for (int64_t row = 0; row < rows; row++) {
        const int64_t rest = ends[row] - starts[row] - at - cut;
        memcpy(out + used, data + starts[row], (size_t)at);
        memcpy(out + used + at, data + starts[row] + at + cut, (size_t)rest);
        used += at + rest;
        out_ends[row] = used;
    }
}

/* --- values ------------------------------------------------------------------------------------------------------- */

/* Copy byte strings into `out`, one behind the other; `offsets` has room for one more than `rows`. Returns whether all
 * bytes are ASCII.
 */
EXPORT int pgcdc_gather(const uint8_t *data, const int64_t *start, const int64_t *length, int64_t rows,
                        int32_t *offsets, uint8_t *out) {
    int64_t to = 0;
    for (int64_t row = 0; row < rows; row++) {
        offsets[row] = (int32_t)to;
        memcpy(out + to, data + start[row], (size_t)length[row]);
        to += length[row];
    }
    offsets[rows] = (int32_t)to;
    uint64_t seen = 0, eight;
    int64_t at = 0;
    for (; at + 8 <= to; at += 8) {
        memcpy(&eight, out + at, 8);
        seen |= eight;
    }
    for (; at < to; at++) seen |= out[at];
    return !(seen & 0x8080808080808080u);
}

/* Print what `uuid_send` sends, 16 bytes each, as `uuid_out` does: 36 bytes each. */
EXPORT void pgcdc_uuid(const uint8_t *data, int64_t rows, uint8_t *out) {
    static const char digits[] = "0123456789abcdef";
    char pairs[256][2];
    for (int i = 0; i < 256; i++) {
        pairs[i][0] = digits[i >> 4];
        pairs[i][1] = digits[i & 15];
    }
    for (int64_t row = 0; row < rows; row++, data += 16) {
        for (int i = 0; i < 16; i++) {
            if (i == 4 || i == 6 || i == 8 || i == 10) *out++ = '-';
            memcpy(out, pairs[data[i]], 2);
            out += 2;
        }
    }
}

typedef unsigned __int128 wide;

/* 10 ** power, up to 38. */
static wide power_of_ten(int power) {
    wide value = 1;
    while (power-- > 0) value *= 10;
    return value;
}

/* Decode `numeric_send` into DECIMAL(precision, scale): integers of 128 bits, low word first. Returns 0, or 1 where a
 * value is malformed or does not fit.
 */
EXPORT int pgcdc_decimal(const uint8_t *data, const int64_t *start, const int64_t *length, const uint8_t *valid,
                         int64_t rows, int precision, int scale, int64_t *words) {
    enum { MOST_DIGITS = 38, FEW_DIGITS = 18 };
    uint64_t few[FEW_DIGITS + 1] = {1};
    for (int i = 1; i <= FEW_DIGITS; i++) few[i] = 10 * few[i - 1];
    const wide limit = power_of_ten(precision);
    for (int64_t row = 0; row < rows; row++) {
        words[2 * row] = words[2 * row + 1] = 0;
        if (valid && !valid[row]) continue;
        const uint8_t *at = data + start[row];
        if (length[row] < 8) return 1;
        const int digits = big16(at), weight = (int16_t)big16(at + 2), sign = big16(at + 4);
        if (length[row] != 8 + 2 * digits || (sign != 0x0000 && sign != 0x4000) || big16(at + 6) > 0x3FFF) return 1;
        if (!digits) continue;
        /* PostgreSQL strips zero digits at both ends. */
        if (!big16(at + 8) || !big16(at + 6 + 2 * digits)) return 1;
        /* The power of ten of the last digit, counted from the type's last place; and the decimal places of the sum. */
        const int shift = 4 * (weight - digits + 1) + scale;
        const int places = 4 * digits + (shift > 0 ? shift : 0);
        if (places <= FEW_DIGITS && shift >= -FEW_DIGITS) {
            uint64_t sum = 0;
            for (int i = 0; i < digits; i++) {
                const uint16_t digit = big16(at + 8 + 2 * i);
                if (digit >= 10000) return 1;
                sum = sum * 10000 + digit;
            }
            if (shift >= 0) {
                sum *= few[shift];
            } else {
                const uint64_t whole = sum / few[-shift];
                if (whole * few[-shift] != sum) return 1;
                sum = whole;
            }
            if (sum >= limit) return 1;
            words[2 * row] = sign ? -(int64_t)sum : (int64_t)sum;
            words[2 * row + 1] = words[2 * row] >> 63;
        } else if (places <= MOST_DIGITS && shift >= -MOST_DIGITS) {
            wide sum = 0;
            for (int i = 0; i < digits; i++) {
                const uint16_t digit = big16(at + 8 + 2 * i);
                if (digit >= 10000) return 1;
                sum = sum * 10000 + digit;
            }
            const wide power = power_of_ten(shift < 0 ? -shift : shift);
            if (shift >= 0) {
                sum *= power;
            } else {
                const wide whole = sum / power;
                if (whole * power != sum) return 1;
                sum = whole;
            }
            if (sum >= limit) return 1;
            const __int128 value = sign ? -(__int128)sum : (__int128)sum;
            words[2 * row] = (int64_t)value;
            words[2 * row + 1] = (int64_t)(value >> 64);
        } else {
            return 1;
        }
    }
    return 0;
}

/* --- printed values ----------------------------------------------------------------------------------------------- */

/* Decode integers as `int2out` and the like print them: no leading zeros, no plus. Returns 0, or 1 where a text is
 * something else or not from `least` to `greatest`.
 */
EXPORT int pgcdc_printed_integer(const uint8_t *data, const int64_t *start, const int64_t *length, const uint8_t *valid,
                                 int64_t rows, int64_t least, int64_t greatest, int64_t *out) {
    for (int64_t row = 0; row < rows; row++) {
        out[row] = 0;
        if (valid && !valid[row]) continue;
        const uint8_t *at = data + start[row], *const end = at + length[row];
        const int negative = at < end && *at == '-';
        at += negative;
        /* Every number of 19 digits fits into an unsigned integer of 64 bits. */
        if (at == end || end - at > 19 || (*at == '0' && (negative || end - at > 1))) return 1;
        uint64_t value = 0;
        for (; at < end; at++) {
            const unsigned digit = (unsigned)*at - '0';
            if (digit > 9) return 1;
            value = value * 10 + digit;
        }
        if (value > (negative ? 0 - (uint64_t)least : (uint64_t)greatest)) return 1;
        out[row] = (int64_t)(negative ? 0 - value : value);
    }
    return 0;
}

/* Decode `numeric_out` into DECIMAL(precision, scale): integers of 128 bits, low word first. Returns 0, or 1 where a
 * text is something else, does not fit, or has more digits than 64 bits hold.
 */
EXPORT int pgcdc_printed_decimal(const uint8_t *data, const int64_t *start, const int64_t *length, const uint8_t *valid,
                                 int64_t rows, int precision, int scale, int64_t *words) {
    enum { FEW_DIGITS = 18 };
    int64_t few[FEW_DIGITS + 1] = {1};
    for (int i = 1; i <= FEW_DIGITS; i++) few[i] = 10 * few[i - 1];
    if (scale > FEW_DIGITS) return 1;
    for (int64_t row = 0; row < rows; row++) {
        words[2 * row] = words[2 * row + 1] = 0;
        if (valid && !valid[row]) continue;
        const uint8_t *at = data + start[row], *const end = at + length[row];
        const int negative = at < end && *at == '-';
        at += negative;
        if (at == end || (*at == '0' && end - at > 1 && at[1] != '.')) return 1;
        int64_t value = 0;
        int digits = 0, places = 0, point = 0;
        for (; at < end; at++) {
            if (*at == '.') {
                if (point || !digits || at + 1 == end) return 1;
                point = 1;
                continue;
            }
            const unsigned digit = (unsigned)*at - '0';
            if (digit > 9 || digits == FEW_DIGITS) return 1;
            value = value * 10 + digit;
            digits++;
            places += point;
        }
        if (places > scale || digits + scale - places > FEW_DIGITS || (negative && !value)) return 1;
        value *= few[scale - places];
        if (precision < FEW_DIGITS && value >= few[precision]) return 1;
        words[2 * row] = negative ? -value : value;
        words[2 * row + 1] = words[2 * row] >> 63;
    }
    return 0;
}

static int two(const uint8_t *at) {
    const unsigned tens = (unsigned)at[0] - '0', ones = (unsigned)at[1] - '0';
    return tens > 9 || ones > 9 ? -1 : (int)(tens * 10 + ones);
}

/* Days since 1970-01-01 of a date of the Gregorian calendar; counts eras of 400 years that begin on 1 March. */
static int64_t days_since_1970(int year, int month, int day) {
    year -= month <= 2;
    const int era = year / 400, of_era = year % 400;
    const int of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
    return (int64_t)era * 146097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719468;
}

/* Decode `date_out`, `timestamp_out` and `timestamptz_out` under ISO dates and UTC, of the years 1 to 9999: days since
 * 1970-01-01, or with `has_time` microseconds. Returns 0, or 1 where there is another text.
 */
EXPORT int pgcdc_printed_moment(const uint8_t *data, const int64_t *start, const int64_t *length, const uint8_t *valid,
                                int64_t rows, int has_time, int has_zone, int64_t *out) {
    static const int days_of[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    for (int64_t row = 0; row < rows; row++) {
        out[row] = 0;
        if (valid && !valid[row]) continue;
        const uint8_t *const at = data + start[row];
        int64_t rest = length[row] - 10;
        if (rest < 0 || at[4] != '-' || at[7] != '-') return 1;
        const int century = two(at), of_century = two(at + 2), month = two(at + 5), day = two(at + 8);
        if (century < 0 || of_century < 0 || month < 1 || month > 12 || day < 1) return 1;
        const int year = 100 * century + of_century;
        const int leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        if (year < 1 || day > days_of[month - 1] + (month == 2 && leap)) return 1;
        const int64_t days = days_since_1970(year, month, day);
        if (!has_time) {
            if (rest) return 1;
            out[row] = days;
            continue;
        }
        if (has_zone) {
            rest -= 3;
            if (rest < 0 || memcmp(at + 10 + rest, "+00", 3)) return 1;
        }
        if (rest < 9 || at[10] != ' ' || at[13] != ':' || at[16] != ':') return 1;
        const int hour = two(at + 11), minute = two(at + 14), second = two(at + 17);
        if (hour < 0 || hour > 23 || minute < 0 || minute > 59 || second < 0 || second > 59) return 1;
        int64_t microseconds = 0;
        if (rest > 9) {
            /* A point, and up to six digits, the last of which is not 0. */
            if (rest < 11 || rest > 16 || at[19] != '.' || at[10 + rest - 1] == '0') return 1;
            for (int i = 0; i < 6; i++) {
                unsigned digit = 0;
                if (10 + i < rest && (digit = (unsigned)at[20 + i] - '0') > 9) return 1;
                microseconds = microseconds * 10 + digit;
            }
        }
        out[row] = (days * 86400 + hour * 3600 + minute * 60 + second) * 1000000 + microseconds;
    }
    return 0;
}

/* Check that all texts are what `float4out` and `float8out` print: shortest digits, NaN or an infinity. Returns 0, or 1
 * where one is not.
 */
EXPORT int pgcdc_printed_float(const uint8_t *data, const int64_t *start, const int64_t *length, const uint8_t *valid,
                               int64_t rows) {
    for (int64_t row = 0; row < rows; row++) {
        if (valid && !valid[row]) continue;
        const uint8_t *at = data + start[row], *const end = at + length[row];
        if (length[row] == 3 && !memcmp(at, "NaN", 3)) continue;
        at += at < end && *at == '-';
        if (end - at == 8 && !memcmp(at, "Infinity", 8)) continue;
        const uint8_t *const first = at;
        while (at < end && *at >= '0' && *at <= '9') at++;
        if (at == first || (*first == '0' && at - first > 1)) return 1;
        if (at < end && *at == '.') {
            const uint8_t *const point = at++;
            while (at < end && *at >= '0' && *at <= '9') at++;
            if (at - point < 2 || at[-1] == '0') return 1;
        }
        if (at < end && *at == 'e') {
            if (++at == end || (*at != '+' && *at != '-')) return 1;
            const uint8_t *const sign = at++;
            while (at < end && *at >= '0' && *at <= '9') at++;
            if (at - sign < 3 || at - sign > 4) return 1;
        }
        if (at != end) return 1;
    }
    return 0;
}
