    CREATE TABLE volumes (
        id                 BLOB NOT NULL PRIMARY KEY,
        owner              TEXT NOT NULL,
        name               TEXT NOT NULL,
        size_bytes         INTEGER NOT NULL,
        state              TEXT NOT NULL,
        created_at         INTEGER NOT NULL,
        updated_at         INTEGER NOT NULL,
        UNIQUE (owner, name)
    ) WITHOUT ROWID;
    CREATE TABLE mounts (
        sandbox            BLOB NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        path               TEXT NOT NULL,
        volume             BLOB NOT NULL REFERENCES volumes (id),
        access             TEXT NOT NULL,
        PRIMARY KEY (sandbox, path)
    ) WITHOUT ROWID;
    CREATE INDEX mounts_by_volume ON mounts (volume);
    -- NULL: no limit, as in all rows that are older than this.
    ALTER TABLE sandboxes ADD COLUMN disk_bytes INTEGER;
