"""What pybk costs on this machine, beside raw writes, sqlite3, LMDB and RocksDB."""
