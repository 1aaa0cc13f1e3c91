    CREATE TABLE labels (
        sandbox         BLOB NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        key             TEXT NOT NULL,
        value           TEXT NOT NULL,
        PRIMARY KEY (sandbox, key)
    ) WITHOUT ROWID;
    CREATE TABLE rules (
        sandbox         BLOB NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        position        INTEGER NOT NULL,
        since           TEXT NOT NULL,
        after_ms        INTEGER NOT NULL,
        action          TEXT NOT NULL,
        PRIMARY KEY (sandbox, position)
    ) WITHOUT ROWID;
    CREATE TABLE stamps (
        sandbox         BLOB NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        since           TEXT NOT NULL,
        wall_at         INTEGER NOT NULL,
        boot            BLOB NOT NULL,
        since_boot      INTEGER NOT NULL,
        cpu             INTEGER,
        PRIMARY KEY (sandbox, since)
    ) WITHOUT ROWID;
