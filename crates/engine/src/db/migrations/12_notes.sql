    CREATE TABLE notes (
        sandbox         BLOB NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        key             TEXT NOT NULL,
        value           TEXT NOT NULL,
        PRIMARY KEY (sandbox, key)
    ) WITHOUT ROWID;
