"""What pybk costs on this machine, compared with raw writes, sqlite3, LMDB and RocksDB."""
