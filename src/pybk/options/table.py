"""The table of all commands and options: each is declared once, here, and everything else is made from it.

A line at the margin is a command, ``WORDS @SETS | what it does``; ``log,wal cat`` declares one of both nouns. A noun
names its default verb, ``(serve)``, and the name of its verbs in ``--help`` if that is not VERB. ``@NAME`` at the
margin is a set of rows that several commands take. Lines that are indented twice continue the one before.

An indented line is a row, ``WHAT | help``, of an argument or of further sets, where ``{}`` stands for the text after
``|``. WHAT has the flags, then ``METAVAR:KIND``; both may be left out, and a flag without them is a switch. KIND is a
name in ``kinds.py``, the choices, or ``MODULE.FUNCTION`` of the command's package. After METAVAR, ``?``, ``*`` and
``+`` are those of argparse, and ``...`` lets a flag be repeated. Further words are:

- ``=DEFAULT``, as a person would write it; ``=`` for an empty text or list
- ``>DEST``, the name in the code, if it is not the flag's or the METAVAR's; ``>DEST:VALUE`` for a flag that stands for
  a value
- ``!`` for a flag that is needed; ``^`` for one that excludes the others with it, ``^!`` if one of those is needed
- ``once`` for an option of a service that is of one start, and stands in no file and no variable; ``reload`` for one
  that a running service follows

``== TITLE`` is the title in ``--help`` of the rows that follow. ``[SECTION]`` is that, and the table in TOML of options
of a service: WHAT begins with the key. Such an option has a variable, ``PYBK_SECTION_KEY``, a flag, ``--section-key``
unless WHAT names one, and after a second ``|`` its default in words.
"""

from typing import Final

TABLE: Final = """
@output
  == options of all commands
  --json | print JSON
  --quiet | print no progress and no notes
  --progress :auto,json,none =auto | show the progress of work that takes longer than a second, on the standard error:
      as a bar on a terminal, or as lines of JSON
  --timeout TIME:seconds | end with status 4 after that time, such as 30s; the command may have taken effect
@secret
  --cluster-secret-file FILE | file that holds the cluster's secret; one line end after it is ignored; FILE.next may
      hold the next secret; default: PYBK_CLUSTER_SECRET_FILE, PYBK_CLUSTER_SECRET
@password
  --password-file FILE | file that holds the password; one line end after it is ignored; default:
      PYBK_PASSWORD_FILE, PYBK_PASSWORD
  --secret-file FILE | file that holds the secret of ledgers that were created with one, as `pybk secret new`
      writes it; default: PYBK_SECRET_FILE, PYBK_SECRET
@passwords @password
  --passwords FILE | TOML file with passwords and secrets by ledger id and type: default, secret, [ledgers], [types]
  --strict | exit 1 also if something could not be checked, or is not sealed
@storage
  --storage-options FILE | TOML file with options of fsspec for the URL, such as key and secret, which are then
      not in the URL; default: PYBK_STORAGE_OPTIONS_FILE
@store @output
  PATH | the directory of the store
@cluster @output @secret
  PATH:cluster | the metadata URL of a cluster: zk://host:port/path, lmdb:///path
@either @output @secret
  PATH:either | the directory of a store, or the metadata URL of a cluster: zk://host:port/path, lmdb:///path
@export @output @secret
  PATH:export | the metadata URL of a cluster: zk://host:port/path, lmdb:///path; or a file of `pybk metadata export`
@url @output @secret
  PATH | the metadata URL of a cluster: zk://host:port,host:port/path, or lmdb:///path
@backup @output @storage
  PATH | the directory of the backup, or a URL of fsspec, such as s3://bucket/path
@confirm
  --yes | do it without asking; otherwise the command asks, on a terminal only
  --dry-run | {}, and change nothing
@watch
  --watch TIME?:seconds | repeat the output every 2 s, or after the given time, until Ctrl-C
@by
  --by WHO | the name of the person who does it, which is recorded; default: the user
@ledgers
  LEDGER+:whole >ledgers | a ledger's id
@ledger
  LEDGER:whole | the ledger's id
@follow
  -f --follow | wait for more, until the {}
@finalize
  --finalize | raise the level; it cannot be lowered again
@probe
  --entries NUMBER:whole =10 | number of entries
  --bytes NUMBER:whole =1024 | bytes of each

cluster | show the state of a cluster; create, probe, balance and upgrade it; change its settings
cluster init @cluster | create a cluster in a metadata store; a cluster that exists stays as it is
  --insecure | create it without a secret, for one host only
cluster probe @cluster @probe | write, read and delete a small ledger, and show how long that takes; exit 1 if it fails
cluster destroy @cluster | delete the metadata of a cluster for good; all ledgers are lost then; exit 3 if a bookie runs
  @confirm | show what would be deleted
cluster status @cluster @watch | show the state of a cluster, its reasons, and the repairs; exit 1 unless it is ok
  --exit-when-healthy | repeat the output until the state is ok
cluster check @cluster | run checks for monitoring, each with a line `OK|WARN|CRIT NAME: text | value`; exit 0, 1 or 2
      for the worst
  NAME* >names | of health, auditor, bookies, lost, one-copy, repairs; default: all
cluster settings | show and change the settings that all members of a cluster follow
cluster settings show @cluster | show all settings, and who changed them last
cluster settings set @cluster @by | change settings; values that do not change are not written
  NAME=VALUE+ >values | such as repair.grace_s=10m, repair.bytes_per_second=64MiB, placement.strict=true, or
      repair.accepted_losses=b1,b2; an empty value is an empty list or text
  --dry-run | show what would change, and change nothing
cluster orphans @cluster | list replicas without metadata, and ledgers without copies
cluster rebalance @cluster | plan moves of copies to emptier bookies, and make them; exit 3 while that is refused
  --plan >what:plan =plan ^ | show what would move, and change nothing; the default
  --apply >what:apply =plan ^ | plan, and begin the moves
  --status >what:status =plan ^ | show the moves that are left; exit 1 if some of them do not proceed
  --abort >what:abort =plan ^ | begin no further moves; copies that were moved stay where they are
cluster upgrade @cluster @finalize | show the feature level, or raise it to the newest

@bookie
  NAME | the bookie's name
bookie (serve) | serve as a bookie; or list, show, probe, drain and remove bookies
bookie serve @service | serve as a bookie until SIGTERM or SIGINT; the word serve may be left out
bookie list @cluster @watch | list the bookies that belong to a cluster
  --removed | also list bookies that were removed
bookie show @cluster @bookie | show a bookie: its state, its data, and its free space
bookie probe @cluster @bookie @probe | write, read and delete a small ledger on one bookie, and show how long that
      takes; exit 1 if it fails
bookie drain @cluster @bookie | copy all entries of a bookie to others; exit 3 if they could not take them
  --wait | wait until it can be drained, if the checks that refuse this pass by themselves, and then until it can be
      removed; Ctrl-C ends the wait, not the drain
bookie cancel-drain @cluster @bookie | end the drain of a bookie
bookie maintenance @cluster @bookie | announce that a bookie may be absent for some time
  --for TIME:seconds >seconds ^! | the time for which it may be absent, such as 30m or 2h
  --end ^! | end the maintenance: the bookie is back
bookie ok-to-stop @cluster | check whether bookies may be stopped; exit 3 if not
  NAME+ >names | a bookie's name
bookie ok-to-remove @cluster @bookie | check that no ledger needs a bookie; exit 3 if one does
  --wait | wait if its drain began just now
bookie remove @cluster @bookie | remove a bookie for good, if no ledger needs it; exit 3 if one does
  --accept-loss LEDGER+:whole | give up the copies of these ledgers on it; all ledgers that name it must be given
  --wait | wait if its drain began just now
  @confirm | check whether it can be removed

ledger | list, show, read, seal and delete ledgers of a store or a cluster
ledger list @either | list the ledgers
  --type TYPE | only ledgers of this type
  --state :open,in_recovery,closed | only ledgers in this state
  --tier :nvme,ssd,hdd | only ledgers in this tier
  --bookie NAME | only ledgers with entries that this bookie should have
  --after LEDGER:whole | only ledgers with a higher id
  --limit NUMBER:positive | list at most this number; the JSON has `next` for --after
ledger show @either @ledgers | show the metadata of ledgers, and the bookies that have their copies
ledger cat @either @ledger @password @shape | print the payloads of a ledger's entries as they are, one after another
  --first ENTRY:whole =0 | first entry
  --last ENTRY:whole | last entry; default: the last one confirmed
  --recover | recover an open ledger first, which fences its writer and closes it; asks before, unless --yes is given
  --yes | do it without asking; otherwise the command asks, on a terminal only
ledger tail @either @ledger @password @shape | print the last entries of a ledger, and with --follow those that
      are confirmed later, until it is closed
  -n ENTRIES:whole =10 | number of entries; default: 10
  @follow | ledger is closed
ledger reseal @either @ledgers @password | check every entry of closed ledgers, and seal them
ledger delete @either @ledgers @password | delete ledgers for good; exit 5 if some of them could not be deleted
  @confirm | show what would be deleted
@shape
  --lines | print a line end after each payload, for text
  --headers | as --lines, and print a line about each entry before its payload

repair | list, run, pause and resume the repairs of a cluster
repair list @cluster @watch | list the ledgers that wait for a repair, the most urgent first
  --reason :lost,damaged,missing,missed,draining,misplaced,rebalance | list only ledgers with this reason
  --stuck | list only ledgers that no worker can repair now
repair status @cluster @watch | show how many ledgers wait by reason and state, the bytes to copy, and why repairs wait
repair run @cluster | copy the missing entries of ledgers now, or all entries of a bookie; exit 5 if some are left
  --bookie NAME ^! | move all ledgers off this bookie, as if it were lost, even if it runs
  --ledger ID:whole ^! | repair this ledger
  --all ^! | repair all ledgers that are listed as queued or stuck
  --dry-run | show the ledgers and the bytes to copy, and copy nothing
repair pause @cluster @by | pause repairs for some time; they resume by themselves
  --for TIME:seconds =1h >seconds | the length of the pause, such as 30m or 2h; at most 1d
repair resume @cluster @by | end a pause of repairs, and accept losses for which repairs wait
  --accept-loss-of NAME+ = | bookies whose loss no longer makes repairs wait
repair losses @cluster @by | list the bookies whose loss is accepted, so their absence does not put repairs on hold;
      or withdraw the acceptance
  --withdraw NAME+ = | no longer accept the loss of these bookies

scrub (run) | check stored entries, and show the progress of these checks
scrub run @either | of a directory: check the checksum of each stored entry now, even while another process writes to
      it; of a cluster: ask all bookies to do so, and return at once. Exit 1 for damage
  --kind :quick,light,deep =deep | of a cluster: every checksum, the index against the files, or a few entries of each
  --ledger ID:whole | of a cluster: read this ledger from all of its bookies now
scrub status @either @watch | show since when all entries were checked, and the damaged ones; exit 1 for damage

metadata | export, check, restore or rebuild a cluster's metadata
metadata export @cluster | write the metadata to a new file, with their MACs and without any secret
  FILE | the file, which must not exist
metadata check @export | decode and verify everything in a metadata store, or in an export; exit 1 if there are problems
  --repair | first replace damaged values of deleted ids: their ids without a ledger then count as deleted
metadata restore @url @directories | restore an export to an empty metadata store, or accept a store that was put
      back; all bookies must be closed
  FILE? | the export; without it the store is accepted as it is
  --directory DIRECTORY... | a bookie's directory
  --new-epoch | the default: ids jump, and bookies do not rely on what they knew
  --same-epoch | the export is the newest state, because the cluster is being moved
  --overwrite | remove the contents of the store before FILE is restored
metadata rebuild @url @directories | rebuild the metadata from bookies' directories; all bookies must be closed
  DIRECTORY+ | a bookie's directory
@directories
  --all-directories | all other directories of bookies are lost for good
  @confirm | show what would be done

secret | replace the secret of a cluster: add, switch, reseal, retire
secret new @output | write a random secret, for ledgers or a cluster, to a new file that only you can read
  FILE | the file; it must not exist
secret status @cluster | show the valid secrets, and what still uses the old one
secret add @cluster | accept the secret in FILE.next as well as that in FILE
secret switch @cluster | use the new secret; exit 3 if a running bookie does not have it
secret reseal @cluster | write the MACs of all metadata with the new secret
secret retire @cluster | refuse the old secret; exit 3 if something still uses it

store | look at the files of a store, verify and mend it
store dump @store | print the contents of the files, record by record
store files @store | list the directories and files of the store
store status @store | show how far the log is durable and what the last checkpoint has, even while a process writes
store verify @store @passwords | check everything up to the durable watermark, even while the store is open for writing
store rebuild-index @store | rebuild the index from the catalog and the files
  --accept-loss | rebuild even if entries or commits are missing; reads of these fail from then on
  --tier-directory TIER=DIRECTORY...:store.tier_directory >tiers | a tier's directory, if the store does not record it
store upgrade @either @finalize | show the feature level, or raise it to the newest

backup (make) | make, verify, show and prune backups of stores, bookies and clusters' ledgers
backup make @either @passwords @storage | copy new entries since the last run to a backup, while writers continue; of a
      cluster, the confirmed entries of the ledgers; exit 1 if an entry is damaged, or a ledger was left out
  TARGET | the directory or URL of fsspec, such as s3://bucket/path: empty, new, or of the backup to continue
  --dry-run | show what would be copied, and write nothing
  --skip-damaged | copy a ledger of a store that has a damaged entry up to the entry before it, and continue; the backup
      records this
backup verify @backup @passwords | check every file and entry of a backup; exit 1 if there are problems, or the last run
      left out entries
backup show @backup | list the runs of a backup
backup prune @backup | remove the oldest runs of a backup for good, and the files that no other run needs
  --keep N:positive | keep the last N runs; default: 1, with --keep-for
  --keep-for TIME:seconds | also keep the runs of the last TIME, such as 30d
  @confirm | show what would be removed

restore @backup @passwords @secret | restore a backup: a store to a new directory, ledgers to a cluster
  DESTINATION | a store's new directory, empty or missing; for a cluster's ledgers, the metadata URL of a cluster
  --new-ids | give a cluster's ledgers new ids, because their former ids are taken
  --ledger ID+:whole >ledgers | restore only these ledgers of a cluster
  --run N:positive >number | the run to restore; default: the last
  --dry-run | show what would be restored, and write nothing

permissions @output | show the files that other users may use, or narrow that
  PATH | the directory of a store or bookie, or the URL of a metadata store: lmdb:///path, zk://host:port/path?...
  --narrow | give access to files to their owner, or with --group to its members; to znodes, to the URL's identity
  --group GROUP | name or number of the group that shares the files

@logs @either @password
  --insecure | the log has no password and no secret; needed only when it is created
@log @logs
  NAME | the log's name
wal | list, read and change write-ahead logs
log | list, read and change named logs
wal,log list @logs | list the logs with their records and ledgers, and their checkpoints or subscriptions
  @prefix | list only names that begin with it
wal,log create @log | create a log without records
wal cat @log | print the data of a log's records, a line each
  --first PLACE:whole | first record: a log sequence number; default: the first that was not truncated
  --last LSN:whole | number of the last record
log cat @log | print the data of a log's records, a line each
  --first PLACE:log.place | first record: a sequence number, a position, txid=NUMBER, or time=TIME as
      2026-01-31T12:00:00+00:00; default: the first that was not truncated
  --last SEQ:whole | number of the last record
wal,log tail @log | print the last records of a log, a line each
  -n RECORDS:whole =10 | how many
  @follow | log is sealed
wal append @log | append each line of standard input as a record; creates the log if needed
log append @log | append each line of standard input as a record; creates the log if needed
  --key KEY | key of the records
  --txid NUMBER:whole | transaction id of the first record; those of later records grow by one
wal truncate @log | drop the records of a log before one of them
  PLACE:whole >before | the first record to keep: a log sequence number
  @confirm | show the records of the log, and drop none
log truncate @log | drop the records of a log before one of them
  PLACE:log.place >before | the first record to keep: a sequence number, a position, txid=NUMBER, or time=TIME as
      2026-01-31T12:00:00+00:00
  --force | drop records that subscriptions have not acknowledged, too
  @confirm | show the records of the log, and drop none
wal,log seal @log | end a log for good
wal,log sweep @logs | delete ledgers that were left behind by processes that died
  @prefix | sweep only logs whose names begin with it
wal,log rebuild @log | rebuild a log whose record is lost or damaged from its ledgers
  --first NUMBER:whole | first record to keep; earlier records are given up
wal,log delete @log | delete a log with its records, and its checkpoints or subscriptions
  --steal | delete it even if it has a live writer, or subscriptions with live owners
  @confirm | check that the log exists
wal,log settings @log | show the settings of a log's ledgers, or change them for all later openings
  --quorums E/W/A:quorums | ensemble size, write and ack quorum: 3/2/2
  --digest :CRC32C,NONE,HMAC_SHA256,XXH3 | digest of the records
  --storage-hint :nvme,ssd,hdd | tier where its ledgers should live
  --segment-bytes BYTES:whole | bytes of a ledger
  --segment-age SECONDS:number | age of a ledger
  --segment-records RECORDS:whole | records of a ledger
  --defaults | remove all settings that are not given
log merge @log @watch | merge small segments of a log into few, large ledgers; writers and readers continue meanwhile
  --segment-bytes SIZE:bytes | the most bytes of a merged segment: 64MiB; default: that in the log's settings, or 64MiB
  --segment-age TIME:seconds | the longest time that a merged segment spans: 30m, 4h; default: likewise, or 4h
  --segment-records RECORDS:positive | the most records of a merged segment; default: likewise, or no limit
  --keep TIME:seconds =1h | the time for which the ledgers that it replaces are kept for readers
log rename @log | give a log another name
  NEW >target | its new name
log subscriptions @log | list the subscriptions of a log, with their unacknowledged records
@prefix
  PREFIX? = | {}

config | check and show the options of a bookie
config check | check a file of options of a bookie, and nothing else; exit 2 if it has a wrong name or value
  FILE >path | a TOML file, as `pybk bookie --config` takes it
  --json | print JSON
config show @service | show the options that `pybk bookie` would take with these arguments and this environment
  --origin | also show where each value comes from

spark JOB | run a job over ledgers on the executors of Apache Spark; needs pip install 'pybk[spark]'
spark verify @either @job @selection @passwords | check every entry on every bookie that should have it
  --repair | repair missing and damaged entries from sound replicas
spark tier @cluster @job @selection @password | move closed ledgers to a tier by policy
  TIER:nvme,ssd,hdd >target | one of nvme, ssd, hdd
  --hint :nvme,ssd,hdd | only ledgers created with this hint
  --older-than AGE:seconds | only ledgers older than this: 90s, 12h, 30d
  --larger-than SIZE:bytes | only ledgers of more payload bytes: 500MiB, 2GiB
  --dry-run | list the ledgers, and move none
spark export @either @job @selection @password @open-too | write ledgers to Parquet files
  DIRECTORY | the directory to write, as a path of Spark
  --overwrite | replace an existing export
spark import @cluster @job @password @quorums | create ledgers from an export, each once
  DIRECTORY | the directory of the export, as a path of Spark
spark inventory @either @job @selection @password | list ledgers and replicas by kind and bookie, and the
      under-replicated ones
spark copy @either @job @selection @password @open-too @quorums | copy ledgers to another cluster, except those that
      were copied before
  TARGET | the metadata URL of the other cluster
  --target-secret-file FILE | file that holds the other cluster's secret
spark compact @cluster @job @password | merge small segments of logs, and small ledgers that Spark has written, into
      few, large ledgers; writers and readers continue meanwhile
  --log NAME... >logs | a log to merge, and no ledgers of Spark; default: all that are not sealed
  --type TYPE | the type of ledgers to merge, and no logs; default: all that Spark has written
  --segment-bytes SIZE:bytes | the most bytes of a merged segment or ledger: 64MiB; default: that in the log's settings,
      or 64MiB
  --segment-age TIME:seconds | the longest time that one spans: 30m, 4h; default: likewise, or 4h
  --segment-records RECORDS:positive | the most records or entries of one; default: likewise, or no limit
  --keep TIME:seconds =1h | the time for which the ledgers that it replaces are kept for readers
spark collect @cluster @password | delete the ledgers that writes from Spark, imports and copies left without a commit
  --older-than AGE:seconds =1d | only ledgers older than this: 90s, 12h, 30d; longer writes are refused afterwards
spark retain @cluster @password | delete ledgers of a type that Spark has written, by age, by size, and by what
      consumers have read
  TYPE | the type of the ledgers
  --max-age AGE:seconds | delete ledgers older than this, once all consumers have read them: 12h, 30d
  --max-bytes SIZE:bytes | keep the newest ledgers of this many payload bytes, and delete the others likewise: 100GiB
  --delete-read | also delete ledgers within these limits that all consumers have read, if there is a consumer
  --delete-unread | delete ledgers beyond these limits even if a consumer has not read them
  --dry-run | list the ledgers, and delete none
spark consumers @cluster | list the queries whose progress retention respects; or remove one of them
  --forget NAME | remove this one, whose query has ended for good
@job
  --master URL | Spark's master; default: that of spark-submit, or all cores of this machine
@selection
  --ledgers IDS:spark.ids | only ledgers with these ids, such as 3,5,7-9
  --type TYPE | only ledgers of this type
@open-too
  --open-too | include open ledgers, up to their last add confirmed
@quorums
  --quorums E/W/A:quorums | ensemble size, write and ack quorum of new ledgers; default: those of the original ledgers

dev | run a cluster of real processes on this host, and try faults
dev up @output | create a cluster and start it, or start those of its processes that do not run
  N?:dev.count >count | number of bookies (default: 3)
  --directory PATH | directory of all its files (default: ~/.local/state/pybk/dev)
  --any-port | use any free ports instead of 3181.. and 9460..
  --zones N:whole =0 | spread the bookies over this number of zones
  --tiers | give each tier a directory of its own, as on its own device
  --foreground | run until Ctrl-C, and then end the cluster
dev status @output | show the processes and their addresses; exit 1 unless all run
  --prometheus | print the scrape configuration for Prometheus
dev logs @output | show the last lines of the logs
  NAME* >names | a bookie, such as b2, or console
  -n --lines N:whole =20 | number of lines of each log
  -f --follow | also show lines as they are added, until Ctrl-C
dev down @output | end all processes; their data stay
dev purge @output | end all processes, and remove their data and the profile
dev stop @output @processes | end a bookie as SIGTERM does, with a drain
dev start @output @processes | start a bookie that does not run
  --replace | let it take its name again although its directory is lost
  --moved | its directory was moved, and no copy of it exists
dev restart @output @processes | stop a bookie and start it
dev kill @output @processes | kill a bookie with SIGKILL
dev pause @output @processes | stop a bookie with SIGSTOP: it neither answers nor ends
dev resume @output @processes | let a paused bookie continue
dev slow @output @processes | make each durable write of a bookie take longer
  --ms MS:number =200 | additional time, milliseconds
  --end | end the delay
dev fill @output @processes | make the devices of a bookie full
  --tier :nvme,ssd,hdd | only the devices of one tier (default: all)
  --end | give them free space again
dev wipe @output @processes | kill a bookie and remove all its files, as if its disks were lost
dev corrupt @output @processes | flip a bit in sealed records of a bookie
  --records N:positive =1 | number of records
@processes
  NAME+ >names | a bookie, such as b2, or console

console @cluster | show and administer a cluster over HTTP, with a page, until SIGTERM or SIGINT
  --name NAME | name of the cluster on the page (default: the name of the profile, or the beginning of the cluster's id)
  == HTTP
  --http HOST:PORT:host_port =127.0.0.1:9460 | address to serve on; beyond loopback it needs tokens and a certificate
  --http-tokens FILE = | file with the valid tokens; see `pybk token`
  --http-certificate FILE = | serve HTTPS with this certificate, in PEM
  --http-key FILE = | its key, if it is in another file
  --http-host NAME... | a further host name that browsers may use for it
  == what bookies do
  --bookies FILE | TOML file with the HTTP port of each bookie: b1 = "http://127.0.0.1:9464"
  --bookies-token FILE = | file that holds a token for these ports
  --bookies-ca FILE = | the authority of their certificates, in PEM
  == records of logs, for tokens with the scope operate
  --peek-secret-file FILE | file with the secret of the logs whose records the page may show
  --peek-password-file FILE | file with their password, if they have one and no secret
  == log
  --log-format :text,json =text | format of lines on the standard error
  --log-level :debug,info,warning,error =info | the least level that is written

token @output | make a token with which a person or a program may use the interface over HTTP
  NAME | name of its holder, for the log
  --scope :read,operate,admin =read | read: to look; operate: also changes that can be undone, such as pauses and
      drains; admin: everything
  --file FILE ! | the file of tokens to add it to; after SIGHUP a service reads the file again

support | collect facts about a cluster or a store for support, without secrets
support bundle @either | write the output of commands that change nothing to a file, without secrets and entries; exit 5
      if one failed
  FILE | the file, a .tar.gz, which must not exist
  --log FILE+ = | include the ends of these logs of processes
  --metrics URL+ = | include the metrics at these URLs, such as http://host:9461/metrics

completion SHELL | print the completion of pybk's commands for bash or zsh
completion bash | print the completion for bash, to be kept as ~/.local/share/bash-completion/completions/pybk
completion zsh | print the completion for zsh; use: pybk completion zsh > DIRECTORY/_pybk, for a DIRECTORY of $fpath

@service @options
  PATH? = | the bookie's directory; write ./list for a directory named like a verb
  --json | print JSON
  --config FILE | TOML file of options; flags and variables override it
@options
  [bookie]
  directory PATH:path ! | the bookie's own directory
  listen --listen ADDRESS...:addresses ! | tcp://host:port (port * for any) or ipc://path; clients get the first one
  advertise --advertise ADDRESS...:addresses | address to register for clients instead, such as
      tcp://bookie1.example.org:3181; needed with tcp://0.0.0.0:...
  advertise_check --advertise-check :switch =true | before it registers, the bookie connects to itself at the registered
      address, and ends if it cannot
  id --id NAME:text | its name | the name from the first start in the directory, or a new one like bookie-1f2e3d4c
  rack --rack :text = | its location, for placement: zone, zone/rack or zone/rack/host
  rack_file --rack-file FILE:path = | a file that holds its location, if `rack` is not given
  start_wait_s --start-wait-s SECONDS:seconds_of_day =0 | the time for which the start is repeated while the metadata
      store cannot be reached
  drain_s --drain-s SECONDS:seconds_of_hour =30 | the longest time that a stopped bookie gives writers to leave; 0
      closes at once
  drain_idle_s --drain-idle-s SECONDS:seconds_of_hour =2 | the time without an add after which writers count as gone
  moved --moved once | the directory was moved since the last start, and no copy of it exists
  replace --replace once | take the name of a bookie whose directory is lost for good
  [cluster]
  metadata --metadata URL:url ! | the cluster's metadata URL: zk://host:port,host:port/path, or lmdb:///path for one
      host
  secret_file FILE:path = | file that holds the cluster's secret; one line end after it is ignored; FILE.next may hold
      the next secret | `cluster-secret` in `$CREDENTIALS_DIRECTORY`, if it exists
  secret :secret | the cluster's secret itself, unless a file is named
  [http]
  listen --http HOST:PORT:host_port = | address of its probes, metrics and facts about itself; beyond loopback it
      serves probes only, unless it has tokens and a certificate | no such port
  tokens FILE:path = | file of the tokens for requests from other hosts, a line NAME SCOPE SHA256 each
  certificate FILE:path = | serve HTTPS with this certificate, in PEM
  key FILE:path = | the key of the certificate | in the file of the certificate
  [store]
  max_entry_bytes BYTES:size | longest payload of an entry
  free_bytes_low BYTES:size | the bookie turns read-only when a device has less free space
  free_bytes_ok BYTES:size | it takes entries again when every device has this much
  max_outstanding_bytes BYTES:size | limit of bytes that are appended and not yet durable
  log_file_bytes BYTES:size | size up to which log files grow
  unchecked_tail_bytes BYTES:size | limit of log bytes that the next start reads again
  cold_block_bytes BYTES:size | bytes of entries per record of a cold segment
  ssd_block_bytes BYTES:size | bytes of entries per record of the SSD tier
  index_cache_bytes BYTES:size | bytes of index pages kept in memory
  fill_ratio RATIO:ratio | files with a smaller share of live bytes are compacted
  default_tier TIER:nvme,ssd,hdd | the tier of ledgers without storage hints
  cold_compression :zstd | compression of cold segments | none
  group :text | group whose members may use the directories as well | the owner alone
  [tier]
  nvme DIRECTORY...:directories | directory of the log, on its own device | `nvme` in `directory`, or where it was
  ssd DIRECTORY...:directories | directory of the SSD tier and the index, on its own device | `ssd` in
      `directory`, or where it was
  hdd DIRECTORY...:directories | directory of cold segments, on its own device | `hdd` in `directory`, or where it was
  [log]
  format :text,json =text | format of lines on the standard error
  level :debug,info,warning,error =info reload | the least level that is written
  [trace]
  on_span --on-span MODULE:NAME:text = | Python hook that is called for each operation, for traces; the module is
      imported at the start | none
"""
