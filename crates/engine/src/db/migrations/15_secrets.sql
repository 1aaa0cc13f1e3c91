    CREATE TABLE secrets (
        name            TEXT NOT NULL PRIMARY KEY,
        bytes           BLOB NOT NULL
    ) WITHOUT ROWID;
