"""The table of all commands and options: each is declared here, once, and everything else is made from it.

A line at the margin is a command, ``WORDS @SETS | what it does``; ``log,wal cat`` is one of both nouns. A noun names
the verb that is meant where none is given, ``(serve)``, and what ``--help`` calls its verbs, unless VERB. ``@NAME``
at the margin is a set of rows that several commands take. Lines that are indented twice continue the one before.

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
  --progress :auto,json,none =auto | of what takes longer than a second, on the standard error: a bar on a terminal, or
      lines of JSON
  --timeout TIME:seconds | end with status 4 after that time, such as 30s; what was begun may have taken effect
@secret
  --cluster-secret-file FILE | holds the cluster's secret; one line end after it is ignored; FILE.next may hold the next
      one; default: PYBK_CLUSTER_SECRET_FILE, PYBK_CLUSTER_SECRET
@password
  --password-file FILE | holds the password; one line end after it is ignored; default: PYBK_PASSWORD_FILE,
      PYBK_PASSWORD
  --secret-file FILE | holds the secret of ledgers that were made with one, as `pybk secret new` writes it; default:
      PYBK_SECRET_FILE, PYBK_SECRET
@passwords @password
  --passwords FILE | TOML with passwords and secrets by ledger id and type: default, secret, [ledgers], [types]
  --strict | exit 1, too, if something could not be checked, or is not sealed
@storage
  --storage-options FILE | TOML with what fsspec takes for the URL, such as key and secret, which then are not in the
      URL; default: PYBK_STORAGE_OPTIONS_FILE
@store
  PATH | the directory of the store
  @output
@cluster
  PATH:cluster | the metadata URL of a cluster: zk://host:port/path, lmdb:///path
  @output @secret
@either
  PATH:either | the directory of a store, or the metadata URL of a cluster: zk://host:port/path, lmdb:///path
  @output @secret
@export
  PATH:export | where the cluster's metadata is: zk://host:port,host:port/path, or lmdb:///path; or a file of `pybk
      metadata export`
  @output @secret
@url
  PATH | where the cluster's metadata is: zk://host:port,host:port/path, or lmdb:///path
  @output @secret
@backup
  PATH | the directory of the backup, or a URL of fsspec, such as s3://bucket/path
  @output @storage
@confirm
  --yes | do it without a question, which is asked on terminals alone
  --dry-run | {}, and change nothing
@watch
  --watch TIME?:seconds | look again and again, each 2 s or the given time, until Ctrl-C
@by
  --by WHO | who does it, for others; default: the user
@ledgers
  LEDGER+:whole >ledgers | a ledger's id
@ledger
  LEDGER:whole | the ledger's id
@follow
  -f --follow | wait for more, until the {}
@finalize
  --finalize | raise the level; it cannot be lowered again
@probe
  --entries NUMBER:whole =10 | how many entries; default: 10
  --bytes NUMBER:whole =1024 | bytes of each; default: 1024

cluster | show how a cluster is, make, probe, balance and upgrade it, and change its settings
cluster init @cluster | make a cluster in a metadata store; one that is there stays as it is
  --insecure | make one without a secret, for one host alone
cluster probe @cluster @probe | write, read and delete a small ledger, and show how long that takes; exit 1 if it fails
cluster destroy @cluster | delete the metadata of a cluster for good, with which all its ledgers are lost; exit 3 if a
      bookie runs
  @confirm | show what would be deleted
cluster status @cluster @watch | show how a cluster is, why, and its repairs; exit 1 unless it is ok
  --exit-when-healthy | watch it until it is ok
cluster check @cluster | make checks for monitoring: a line `OK|WARN|CRIT NAME: text | value` each; exit 0, 1 or 2 for
      the worst
  NAME* >names | of health, auditor, bookies, lost, one-copy, repairs; default: all
cluster settings | show and change the settings that all members of a cluster follow
cluster settings show @cluster | show all settings, and who changed them last
cluster settings set @cluster @by | change settings; what is the same already is not written
  NAME=VALUE+ >values | such as repair.grace_s=10m, repair.bytes_per_second=64MiB, placement.strict=true, or
      repair.accepted_losses=b1,b2; an empty value is an empty list or text
  --dry-run | show what would change, and change nothing
cluster orphans @cluster | list replicas without metadata, and ledgers without copies
cluster rebalance @cluster | plan which copies move to emptier bookies, and move them; exit 3 while that is refused
  --plan >what:plan =plan ^ | show what would move, and change nothing; the default
  --apply >what:apply =plan ^ | plan, and begin the moves
  --status >what:status =plan ^ | show what is left; exit 1 if some of it does not proceed
  --abort >what:abort =plan ^ | begin no further move; what was moved stays where it is
cluster upgrade @cluster @finalize | show the feature level, or raise it to the newest

@bookie
  NAME | the bookie's name
bookie (serve) | serve as a bookie; or list, show, probe, drain and remove bookies
bookie serve @service | serve as a bookie until SIGTERM or SIGINT; the word serve may be left out
bookie list @cluster @watch | list the bookies that belong to a cluster
  --removed | also those that were removed
bookie show @cluster @bookie | show a bookie: its state, what it has, and how much is free
bookie probe @cluster @bookie @probe | write, read and delete a small ledger on a bookie alone, and show how long that
      takes; exit 1 if it fails
bookie drain @cluster @bookie | copy all that a bookie has to others; exit 3 if they could not take it
  --wait | until it can be drained, if what refuses that passes by itself, and then until it can be removed; Ctrl-C
      leaves it going
bookie cancel-drain @cluster @bookie | end the drain of a bookie
bookie maintenance @cluster @bookie | announce that a bookie may be absent for some time
  --for TIME:seconds >seconds ^! | such as 30m or 2h
  --end ^! | it is back
bookie ok-to-stop @cluster | check whether bookies may be stopped; exit 3 if not
  NAME+ >names | a bookie's name
bookie ok-to-remove @cluster @bookie | check that no ledger needs a bookie; exit 3 if one does
  --wait | while its drain began just now
bookie remove @cluster @bookie | remove a bookie for good, if no ledger needs it; exit 3 if one does
  --accept-loss LEDGER+:whole | give up the copies of these ledgers on it; all that name it are needed
  --wait | while its drain began just now
  @confirm | check whether it can be removed

ledger | list, show, read, seal and delete ledgers of a store or a cluster
ledger list @either | list the ledgers
  --type TYPE | only ledgers of this type
  --state :open,in_recovery,closed | only ledgers in this state
  --tier :nvme,ssd,hdd | only ledgers in this tier
  --bookie NAME | only ledgers of which this bookie should have entries
  --after LEDGER:whole | only ledgers with a higher id
  --limit NUMBER:positive | at most so many; the JSON has `next` for --after
ledger show @either @ledgers | show the metadata of ledgers, and where their copies are
ledger cat @either @ledger @password | print the payloads of a ledger's entries as they are, one after the other
  --first ENTRY:whole =0 | first entry; default: 0
  --last ENTRY:whole | last entry; default: the last one confirmed
  --recover | find the end of an open ledger first, which fences its writer and closes it; asks, or takes --yes
  --yes | do it without a question, which is asked on terminals alone
  @shape
ledger tail @either @ledger @password | print the last entries of a ledger, and with --follow those that are confirmed
      later, until it is closed
  -n ENTRIES:whole =10 | how many; default: 10
  @follow | ledger is closed
  @shape
ledger reseal @either @ledgers @password | check every entry of closed ledgers, and seal them
ledger delete @either @ledgers @password | delete ledgers for good; exit 5 if some of them could not be deleted
  @confirm | show what would be deleted
@shape
  --lines | print a line end after each payload; for text
  --headers | as --lines, and a line about the entry before its payload

repair | list, run, pause and resume the repairs of a cluster
repair list @cluster @watch | list the ledgers that are to be repaired, the most urgent first
  --reason :lost,damaged,missing,draining,misplaced,rebalance | of this reason alone
  --stuck | only those that no worker can mend now
repair status @cluster @watch | show how many ledgers wait by reason and state, what is left to copy, and why repairs
      wait
repair run @cluster | copy now what a ledger lacks, or all that a bookie has to others; exit 5 if something is left
  --bookie NAME ^! | move all ledgers off this bookie, as if it were lost, also if it runs
  --ledger ID:whole ^! | this ledger
  --all ^! | all ledgers that are listed as queued or stuck
  --dry-run | show which ledgers and how much, and copy nothing
repair pause @cluster @by | pause repairs for some time; they resume by themselves
  --for TIME:seconds =1h >seconds | such as 30m or 2h; default: 1h; at most 1d
repair resume @cluster @by | end a pause of repairs, and accept losses that they wait for
  --accept-loss-of NAME+ = | bookies whose loss does not make repairs wait any more
repair losses @cluster @by | list the bookies whose loss is accepted, so that repairs are not on hold because of them;
      or withdraw that
  --withdraw NAME+ = | the losses of these are not accepted

scrub (run) | have stored entries be checked, and see how their checks proceed
scrub run @either | of a directory: check the checksum of each stored entry now, also while another process writes it;
      of a cluster: ask all bookies to do so, and return at once. Exit 1 for damage
  --kind :quick,light,deep =deep | of a cluster: every checksum (the default), the index against the files, or a few
      entries of each
  --ledger ID:whole | of a cluster: read this ledger from all of its bookies now
scrub status @either @watch | show since when everything was checked, and what is damaged; exit 1 for damage

metadata | export, check, restore or rebuild a cluster's metadata
metadata export @cluster | write the metadata to a new file, with their MACs and without any secret
  FILE | the file, which must not exist
metadata check @export | decode and verify everything in a metadata store, or in an export; exit 1 if there are problems
  --repair | first make damaged values of deleted ids again: their ids that no ledger has count as deleted then
metadata restore @url | restore an export to an empty metadata store, or accept one that was put back; all bookies must
      be closed
  FILE? | the export; without it the store is accepted as it is
  --directory DIRECTORY... | a bookie's directory; may be repeated
  --new-epoch | the default: ids jump, and bookies do not trust what they know
  --same-epoch | the export is known to be the newest state: a cluster is moved
  --overwrite | remove what the store has before FILE is restored
  @directories
metadata rebuild @url | make the metadata again from bookies' directories; all bookies must be closed
  DIRECTORY+ | a bookie's directory
  @directories
@directories
  --all-directories | all other directories of bookies are lost for good
  @confirm | show what would be done

secret | replace the secret of a cluster: add, switch, reseal, retire
secret new @output | write a random secret, of ledgers or a cluster, to a new file for you alone
  FILE | the file; it must not exist
secret status @cluster | show which secrets are valid, and what uses the old one
secret add @cluster | accept the secret in FILE.next as well as that in FILE
secret switch @cluster | use the new secret; exit 3 if a running bookie does not have it
secret reseal @cluster | write the MACs of all metadata with the new secret
secret retire @cluster | refuse the old secret; exit 3 if something still uses it

store | look at the files of a store, verify and mend it
store dump @store | print the contents of the files, record by record
store files @store | list the directories and files of the store
store status @store | show how far the log is durable, and what the last checkpoint has; also while another process
      writes it
store verify @store @passwords | check everything up to the durable watermark; the store may be open for writing
      meanwhile
store rebuild-index @store | rebuild the index from the catalog and the files
  --accept-loss | rebuild although entries or commits are missing; reading these fails from then on
  --tier-directory TIER=DIRECTORY...:store.tier_directory >tiers | a tier's directory, if the store does not
      remember it; again for more
store upgrade @either @finalize | show the feature level, or raise it to the newest

backup (make) | make, verify, show and prune backups of stores, bookies and clusters' ledgers
backup make @either @passwords @storage | copy what is new since the last run to a backup, while others write; of a
      cluster, the ledgers as far as they are confirmed; exit 1 if an entry is damaged, or a ledger was left out
  TARGET | the directory of the backup, or a URL of fsspec, such as s3://bucket/path; empty, new, or that of the
      backup to continue
  --dry-run | say what would be copied, and write nothing
  --skip-damaged | copy a ledger of a store with a damaged entry up to the entry before, and continue; the backup says
      so
backup verify @backup @passwords | check every file and entry of a backup; exit 1 if there are problems, or the last run
      left out entries
backup show @backup | list the runs of a backup
backup prune @backup | remove the oldest runs of a backup for good, and what no other run needs
  --keep N:positive | keep the last N runs; default: 1, with --keep-for
  --keep-for TIME:seconds | keep the runs of the last TIME, such as 30d, too
  @confirm | show what would be removed

restore @backup @passwords @secret | restore a backup: a store to a new directory, ledgers to a cluster
  DESTINATION | a store's new directory, empty or not there yet; for a cluster's ledgers, the metadata URL of a cluster
  --new-ids | give a cluster's ledgers new ids, because those that they had are taken
  --ledger ID+:whole >ledgers | of a cluster's ledgers, only these
  --run N:positive >number | the run to restore; default: the last
  --dry-run | say what would be restored, and write nothing

permissions @output | show which files others may use, or narrow that
  PATH | the directory of a store or bookie, or the URL of a metadata store: lmdb:///path, zk://host:port/path?...
  --narrow | give the files to their owner alone, or with --group to its members; the znodes to the URL's identity
  --group GROUP | name or number of the group that shares the files

@logs @either @password
  --insecure | of a log without a password; needed only where one is made
@log @logs
  NAME | the log's name
wal | list, read and change write-ahead logs
log | list, read and change named logs
wal list @logs | list the logs with their records, ledgers and checkpoints
  @prefix | list only names that begin with it
log list @logs | list the logs with their records, ledgers and subscriptions
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
  -n RECORDS:whole =10 | how many; default: 10
  @follow | log is sealed
wal append @log | append each line of standard input as a record; makes the log if needed
log append @log | append each line of standard input as a record; makes the log if needed
  --key KEY | key of the records
  --txid NUMBER:whole | transaction id of the first; the next have the next
wal truncate @log | drop the records of a log before one of them
  PLACE:whole >before | the first record to keep: a log sequence number
  @confirm | show what the log has now
log truncate @log | drop the records of a log before one of them
  PLACE:log.place >before | the first record to keep: a sequence number, a position, txid=NUMBER, or time=TIME as
      2026-01-31T12:00:00+00:00
  @confirm | show what the log has now
wal,log seal @log | end a log for good
wal,log sweep @logs | delete ledgers that processes which died left behind
  @prefix | only of logs whose names begin with it
wal rebuild @log | make a log whose record is lost or damaged again from its ledgers
  --first LSN:whole | first record to keep, giving up those before
log rebuild @log | make a log whose record is lost or damaged again from its ledgers
  --first SEQ:whole | first record to keep, giving up those before
wal delete @log @delete | delete a log with its records and checkpoints
log delete @log @delete | delete a log with its records and subscriptions
wal,log settings @log | show how the ledgers of a log are made, or change it for all who open it
  --quorums E/W/A:quorums | ensemble size, write and ack quorum: 3/2/2
  --digest :CRC32C,NONE,HMAC_SHA256,XXH3 | what guards the records
  --storage-hint :nvme,ssd,hdd | where its ledgers should live
  --segment-bytes BYTES:whole | bytes of a ledger
  --segment-age SECONDS:number | age of a ledger
  --segment-records RECORDS:whole | records of a ledger
  --defaults | give up all settings that are not given
log rename @log | give a log another name
  NEW >target | its new name
log subscriptions @log | list the subscriptions of a log with what they have not acknowledged
@prefix
  PREFIX? = | {}
@delete
  --steal | also from a live writer, and live owners of subscriptions
  @confirm | check that the log is there

config | check and show the options of a bookie
config check | check a file of options of a bookie, and nothing else; exit 2 if it has a wrong name or value
  FILE >path | a TOML file, as `pybk bookie --config` takes it
  --json | print JSON
config show @service | show the options that `pybk bookie` would take with these arguments and this environment
  --origin | also show where each value comes from

spark JOB | run a job over ledgers on the executors of Apache Spark; needs pip install 'pybk[spark]'
spark verify @either @job @selection @passwords | check every entry on every bookie that should have it
  --repair | replace what is missing or damaged from sound replicas
spark tier @cluster @job @selection @password | move closed ledgers to a tier by policy
  TIER:nvme,ssd,hdd >target | one of nvme, ssd, hdd
  --hint :nvme,ssd,hdd | only ledgers created with this hint
  --older-than AGE:seconds | only ledgers older than this: 90s, 12h, 30d
  --larger-than SIZE:bytes | only ledgers of more payload bytes: 500MiB, 2GiB
  --dry-run | list the ledgers, and move none
spark export @either @job @selection @password @open-too | write ledgers to Parquet files
  DIRECTORY | the directory to write, as a path of Spark
  --overwrite | replace an export that is there
spark import @cluster @job @password @quorums | create ledgers from an export, each once
  DIRECTORY | the directory of the export, as a path of Spark
spark inventory @either @job @selection @password | list ledgers and replicas by kind and bookie, and what is
      under-replicated
spark copy @either @job @selection @password @open-too @quorums | copy ledgers to another cluster, except those that
      were copied before
  TARGET | the metadata URL of the other cluster
  --target-secret-file FILE | holds the other cluster's secret
spark collect @cluster @password | delete the ledgers that writes from Spark, imports and copies left without a commit
  --older-than AGE:seconds =1d | only ledgers older than this: 90s, 12h, 30d; default: 1d. Writes that take longer are
      refused afterwards
@job
  --master URL | Spark's master; default: that of spark-submit, or all cores of this machine
@selection
  --ledgers IDS:spark.ids | only these, such as 3,5,7-9
  --type TYPE | only ledgers of this type
@open-too
  --open-too | also open ledgers, up to their last add confirmed
@quorums
  --quorums E/W/A:quorums | ensemble size, write quorum and ack quorum of the new ledgers; default: those of the
      old ones

dev | run a cluster of real processes on this host, and try faults
dev up @output | make a cluster and start it, or start what does not run of it
  N?:dev.count >count | how many bookies (default: 3)
  --directory PATH | where all of it lies (default: ~/.local/state/pybk/dev)
  --any-port | take ports that are free, not 3181.. and 9460..
  --zones N:whole =0 | spread the bookies over so many zones
  --tiers | give each tier a directory of its own, as on its own device
  --foreground | stay until Ctrl-C, and end the cluster then
dev status @output | show the processes and their addresses; exit 1 unless all run
  --prometheus | print the scrape configuration for Prometheus
dev logs @output | show the last lines of the logs
  NAME* >names | a bookie, such as b2, or console
  -n --lines N:whole =20 | of each (default: 20)
  -f --follow | and what is added, until Ctrl-C
dev down @output | end all processes; their data stay
dev purge @output | end all processes, and remove what they keep, and the profile
dev stop @output @processes | end a bookie as SIGTERM does, with a drain
dev start @output @processes | start a bookie that does not run
  --replace | it takes its name again although its directory is lost
  --moved | its directory was moved, and no copy of it is left
dev restart @output @processes | stop a bookie and start it
dev kill @output @processes | kill a bookie with SIGKILL
dev pause @output @processes | stop a bookie with SIGSTOP, so that it neither answers nor ends
dev resume @output @processes | let a paused bookie continue
dev slow @output @processes | make each durable write of a bookie take longer
  --ms MS:number =200 | how much longer, milliseconds (default: 200)
  --end | let its disks be as they are
dev fill @output @processes | let the devices of a bookie be full
  --tier :nvme,ssd,hdd | those of one tier (default: all)
  --end | let them have space again
dev wipe @output @processes | kill a bookie and remove all that it keeps, as if its disks were lost
dev corrupt @output @processes | flip a bit in sealed records of a bookie
  --records N:positive =1 | in how many (default: 1)
@processes
  NAME+ >names | a bookie, such as b2, or console

console @cluster | show and administer a cluster over HTTP, with a page, until SIGTERM or SIGINT
  --name NAME | what the page calls the cluster (default: the name of the profile, or the beginning of the cluster's id)
  == HTTP
  --http HOST:PORT:host_port =127.0.0.1:9460 | where it serves; beyond loopback it takes tokens and a certificate
      (default: 127.0.0.1:9460)
  --http-tokens FILE = | the tokens that are valid; see `pybk token`
  --http-certificate FILE = | serve HTTPS with this certificate, in PEM
  --http-key FILE = | its key, if it is in another file
  --http-host NAME... | a further name by which browsers may ask for it; give it again for more
  == what bookies do
  --bookies FILE | TOML with the HTTP port of each: b1 = "http://127.0.0.1:9464"
  --bookies-token FILE = | holds the token that they take
  --bookies-ca FILE = | the authority of their certificates, in PEM
  == records of logs, for tokens with the scope operate
  --peek-secret-file FILE | holds the secret of the logs whose records the page may show
  --peek-password-file FILE | holds their password, if they have one and no secret
  == log
  --log-format :text,json =text | of lines on the standard error
  --log-level :debug,info,warning,error =info | the least level

token @output | make a token with which a person or a program may use the interface over HTTP
  NAME | whose it is, for the log
  --scope :read,operate,admin =read | read: to look; operate: also what can be taken back, such as pauses and drains;
      admin: everything
  --file FILE ! | the file of tokens that it is added to; SIGHUP has it read again

support | collect what helpers want to see of a cluster or a store, without secrets
support bundle @either | write what commands show that only look to a file, without secrets and entries; exit 5 if one
      failed
  FILE | the file, a .tar.gz, which must not exist
  --log FILE+ = | also the ends of these logs of processes
  --metrics URL+ = | also what these give, such as http://host:9461/metrics

completion SHELL | print what completes the commands of pybk in bash or zsh
completion bash | print the completion for bash; use: pybk completion bash >
      ~/.local/share/bash-completion/completions/pybk
completion zsh | print the completion for zsh; use: pybk completion zsh > DIRECTORY/_pybk, for a DIRECTORY of $fpath

@service
  PATH? = | the bookie's directory; ./list for one that is called like a verb
  --json | print JSON
  --config FILE | TOML file of options; flags and variables come before what it says
  @options
@options
  [bookie]
  directory PATH:path ! | the bookie's own directory
  listen --listen ADDRESS...:addresses ! | tcp://host:port (port * for any) or ipc://path; give it again for more
      addresses; the first one is registered for clients
  advertise --advertise ADDRESS...:addresses | address to register for clients instead, such as
      tcp://bookie1.example.org:3181; needed with tcp://0.0.0.0:...
  advertise_check --advertise-check :switch =true | before it registers, the bookie connects to itself at the registered
      address, and ends if it cannot
  id --id NAME:text | its name | that from the first start in the directory, or a new one like bookie-1f2e3d4c
  rack --rack :text = | where it stands, for placement: zone, zone/rack or zone/rack/host
  rack_file --rack-file FILE:path = | a file that says where it stands, if `rack` does not
  start_wait_s --start-wait-s SECONDS:seconds_of_day =0 | how long the start is tried again while the metadata store
      cannot be reached
  drain_s --drain-s SECONDS:seconds_of_hour =30 | how long, at most, the bookie lets writers leave when it is stopped; 0
      closes at once
  drain_idle_s --drain-idle-s SECONDS:seconds_of_hour =2 | without an add for so long, writers have left
  moved --moved once | the directory was moved since the last start, and no copy of it is left
  replace --replace once | take the name of a bookie whose directory is lost for good
  [cluster]
  metadata --metadata URL:url ! | where the cluster's metadata is: zk://host:port,host:port/path, or lmdb:///path for
      one host
  secret_file FILE:path = | holds the cluster's secret; one line end after it is ignored; FILE.next may hold the next
      one | `cluster-secret` in `$CREDENTIALS_DIRECTORY`, if it is there
  secret :secret | the cluster's secret itself, unless a file is named
  [http]
  listen --http HOST:PORT:host_port = | where it has probes, metrics and what it knows of itself; beyond loopback probes
      alone, unless there are tokens and a certificate | no such port
  tokens FILE:path = | the tokens with which others than this host may look, NAME SCOPE SHA256 a line
  certificate FILE:path = | serve HTTPS with this certificate, in PEM
  key FILE:path = | the key of the certificate | in the file of the certificate
  [store]
  max_entry_bytes BYTES:size | longest payload of an entry
  free_bytes_low BYTES:size | the bookie turns read-only when a device has less free space
  free_bytes_ok BYTES:size | it takes entries again when every device has this much
  max_outstanding_bytes BYTES:size | limit of what is appended and not yet durable
  log_file_bytes BYTES:size | size up to which log files grow
  unchecked_tail_bytes BYTES:size | limit of log bytes that the next start reads again
  cold_block_bytes BYTES:size | bytes of entries per record of a cold segment
  ssd_block_bytes BYTES:size | bytes of entries per record of the SSD tier
  index_cache_bytes BYTES:size | index pages kept in memory
  fill_ratio RATIO:ratio | emptier files are compacted
  default_tier TIER:nvme,ssd,hdd | the tier of ledgers without storage hints
  cold_compression :zstd | how cold segments are compressed | none
  group :text | group whose members may use the directories as well | the owner alone
  [tier]
  nvme DIRECTORY...:directories | directory of the log, on its own device; give it again for more devices | `nvme` in
      the bookie's directory, or where it was
  ssd DIRECTORY...:directories | directory of the SSD tier and the index, on its own device; give it again for more
      devices | `ssd` in the bookie's directory, or where it was
  hdd DIRECTORY...:directories | directory of cold segments, on its own device; give it again for more devices | `hdd`
      in the bookie's directory, or where it was
  [log]
  format :text,json =text | how lines are written to standard error
  level :debug,info,warning,error =info reload | the least level that is written
  [trace]
  on_span --on-span MODULE:NAME:text = | hook of Python that is called for operations, for traces; the module is
      imported at the start | none
"""
