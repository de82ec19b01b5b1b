import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Random;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicReference;
import java.util.concurrent.locks.LockSupport;
import org.apache.bookkeeper.client.BookKeeperAdmin;
import org.apache.bookkeeper.client.api.BookKeeper;
import org.apache.bookkeeper.client.api.DigestType;
import org.apache.bookkeeper.client.api.LastConfirmedAndEntry;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.client.api.ReadHandle;
import org.apache.bookkeeper.client.api.WriteHandle;
import org.apache.bookkeeper.conf.ClientConfiguration;
import org.apache.bookkeeper.conf.ServerConfiguration;

/**
 * A client of BookKeeper that does what it is told by lines of its standard input, and answers each with a figure and
 * the number of entries that it took.
 *
 * <p>Ledgers are on three bookies, count when two have synced an entry, and have an HMAC. Entries have 1 KiB.
 *
 * <pre>
 *   Drive init URL     make a new cluster's metadata
 *   Drive serve URL    append SECONDS            milliseconds of one append at a time, median
 *                      outstanding N SECONDS     entries per second, N outstanding
 *                      fill ENTRIES              write the ledger that the next two read
 *                      random SECONDS            milliseconds of one random read at a time, median
 *                      scan SECONDS              megabytes per second, from end to end
 *                      follow SECONDS            milliseconds until a follower with a client of its own has an entry
 * </pre>
 */
public class Drive {
    static final int ENTRY_BYTES = 1024;
    static final int SCAN_ENTRIES = 1000;
    static final int FILL_OUTSTANDING = 1000;
    static final long BETWEEN_NS = 5_000_000L;
    static final int SKIPPED = 5;
    static final int POLL_MS = 1000;
    static final byte[] PASSWORD = "benchmark".getBytes(StandardCharsets.UTF_8);
    static final byte[] PAYLOAD = new byte[ENTRY_BYTES];

    /** Times of single operations. */
    static final class Latencies {
        private long[] ns = new long[1 << 12];
        private int count;

        synchronized void add(long took) {
            if (count == ns.length) ns = Arrays.copyOf(ns, 2 * count);
            ns[count++] = took;
        }

        synchronized double medianMs() {
            if (count == 0) throw new IllegalStateException("nothing was measured");
            Arrays.sort(ns, 0, count);
            return ns[count / 2] / 1e6;
        }

        synchronized int count() {
            return count;
        }
    }

    private final String url;
    private final BookKeeper client;
    private WriteHandle writer;
    private ReadHandle reader;

    Drive(String url) throws Exception {
        this.url = url;
        client = connect(url);
        writer = create();
    }

    /** Connects without the limit of 5000 entries per second and ledger that a client has by default. */
    static BookKeeper connect(String url) throws Exception {
        ClientConfiguration configuration = new ClientConfiguration();
        configuration.setMetadataServiceUri(url);
        configuration.setThrottleValue(0);
        return BookKeeper.newBuilder(configuration).build();
    }

    WriteHandle create() throws Exception {
        return client.newCreateLedgerOp().withEnsembleSize(3).withWriteQuorumSize(3).withAckQuorumSize(2)
            .withDigestType(DigestType.MAC).withPassword(PASSWORD).execute().get();
    }

    static ReadHandle open(BookKeeper client, long id) throws Exception {
        return client.newOpenLedgerOp().withLedgerId(id).withDigestType(DigestType.MAC).withPassword(PASSWORD)
            .withRecovery(false).execute().get();
    }

    String append(double seconds) throws Exception {
        Latencies latencies = new Latencies();
        long now = System.nanoTime(), end = now + (long) (seconds * 1e9);
        while (now < end) {
            long begin = now;
            writer.append(PAYLOAD);
            now = System.nanoTime();
            latencies.add(now - begin);
        }
        return latencies.medianMs() + " " + latencies.count();
    }

    /** Appends until the time is over or so many were appended; returns how many. */
    static long append(WriteHandle writer, int outstanding, long most, long end) throws Exception {
        Semaphore room = new Semaphore(outstanding);
        AtomicReference<Throwable> failed = new AtomicReference<>();
        long appended = 0;
        while (appended < most && System.nanoTime() < end) {
            room.acquire();
            if (failed.get() != null) break;
            appended++;
            writer.appendAsync(PAYLOAD).whenComplete((id, error) -> {
                if (error != null) failed.set(error);
                room.release();
            });
        }
        room.acquire(outstanding);
        if (failed.get() != null) throw new Exception(failed.get());
        return appended;
    }

    String outstanding(int outstanding, double seconds) throws Exception {
        long begin = System.nanoTime();
        long appended = append(writer, outstanding, Long.MAX_VALUE, begin + (long) (seconds * 1e9));
        return appended / ((System.nanoTime() - begin) / 1e9) + " " + appended;
    }

    String fill(long entries) throws Exception {
        WriteHandle filled = create();
        append(filled, FILL_OUTSTANDING, entries, Long.MAX_VALUE);
        filled.close();
        reader = open(client, filled.getId());
        return reader.getLastAddConfirmed() + 1 + " " + entries;
    }

    String random(double seconds) throws Exception {
        Latencies latencies = new Latencies();
        Random source = new Random(3);
        long now = System.nanoTime(), end = now + (long) (seconds * 1e9);
        while (now < end) {
            long begin = now;
            long id = (long) (source.nextDouble() * (reader.getLastAddConfirmed() + 1));
            try (LedgerEntries entries = reader.read(id, id)) {
                if (entries.getEntry(id).getEntryBuffer().readableBytes() != ENTRY_BYTES) throw new Exception("short");
            }
            now = System.nanoTime();
            latencies.add(now - begin);
        }
        return latencies.medianMs() + " " + latencies.count();
    }

    String scan(double seconds) throws Exception {
        long begin = System.nanoTime(), end = begin + (long) (seconds * 1e9), bytes = 0, first = 0;
        while (System.nanoTime() < end) {
            long last = Math.min(reader.getLastAddConfirmed(), first + SCAN_ENTRIES - 1);
            try (LedgerEntries entries = reader.read(first, last)) {
                for (LedgerEntry entry : entries) bytes += entry.getEntryBuffer().readableBytes();
            }
            first = last == reader.getLastAddConfirmed() ? 0 : last + 1;
        }
        return bytes / 1e6 / ((System.nanoTime() - begin) / 1e9) + " " + bytes / ENTRY_BYTES;
    }

    String follow(double seconds) throws Exception {
        Latencies latencies = new Latencies();
        AtomicReference<Throwable> failed = new AtomicReference<>();
        long wanted = SKIPPED + Math.max(1, Math.round(seconds * 1e9 / BETWEEN_NS));
        try (BookKeeper other = connect(url); WriteHandle followed = create()) {
            followed.append(PAYLOAD);  // a long poll of a ledger without entries fails
            ReadHandle follower = open(other, followed.getId());
            Thread thread = new Thread(() -> {
                try {
                    for (long next = 1; next <= wanted; ) {
                        try (LastConfirmedAndEntry seen =
                                follower.readLastAddConfirmedAndEntryAsync(next, POLL_MS, true).get()) {
                            if (!seen.hasEntry()) continue;
                            long sent = seen.getEntry().getEntryNioBuffer().getLong();
                            if (next++ > SKIPPED) latencies.add(System.nanoTime() - sent);
                        }
                    }
                } catch (Exception error) {
                    failed.set(error);
                }
            });
            thread.start();
            long due = System.nanoTime();
            // One more tells the follower that the last one is confirmed.
            for (long number = 0; number <= wanted && failed.get() == null; number++) {
                byte[] payload = new byte[ENTRY_BYTES];
                ByteBuffer.wrap(payload).putLong(System.nanoTime());
                followed.append(payload);
                due += BETWEEN_NS;
                LockSupport.parkNanos(Math.max(0, due - System.nanoTime()));
            }
            thread.join();
            follower.close();
        }
        if (failed.get() != null) throw new Exception(failed.get());
        return latencies.medianMs() + " " + latencies.count();
    }

    String answer(String[] told) throws Exception {
        double last = Double.parseDouble(told[told.length - 1]);
        switch (told[0]) {
            case "append": return append(last);
            case "outstanding": return outstanding(Integer.parseInt(told[1]), last);
            case "fill": return fill((long) last);
            case "random": return random(last);
            case "scan": return scan(last);
            case "follow": return follow(last);
            default: throw new IllegalArgumentException(told[0]);
        }
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments[0].equals("init")) {
            ServerConfiguration configuration = new ServerConfiguration();
            configuration.setMetadataServiceUri(arguments[1]);
            if (!BookKeeperAdmin.initNewCluster(configuration)) System.exit(1);
            System.exit(0);
        }
        try (BufferedReader lines = new BufferedReader(new InputStreamReader(System.in))) {
            Drive drive = new Drive(arguments[1]);
            System.out.println("ready 0");
            for (String line; (line = lines.readLine()) != null; ) System.out.println(drive.answer(line.split(" ")));
        } catch (Exception error) {
            error.printStackTrace();
            System.exit(1);
        }
        System.exit(0);
    }
}
