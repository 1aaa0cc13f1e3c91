    CREATE TABLE builds (
        id                 BLOB NOT NULL PRIMARY KEY,
        owner              TEXT NOT NULL,
        template           TEXT NOT NULL,
        state              TEXT NOT NULL,
        reason             TEXT,
        -- Of the template, once there is one.
        version            INTEGER,
        created_at         INTEGER NOT NULL,
        ended_at           INTEGER
    ) WITHOUT ROWID;
