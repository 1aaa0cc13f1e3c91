    CREATE TABLE snapshots (
        id                 BLOB NOT NULL PRIMARY KEY,
        owner              TEXT NOT NULL,
        name               TEXT NOT NULL,
        -- Tags that are set when it is ready, one in a line.
        wanted_tags        TEXT NOT NULL,
        -- What sandboxes are made from, once there is that.
        template           BLOB,
        -- Where it was captured. That may be gone.
        sandbox            BLOB,
        image              TEXT,
        state              TEXT NOT NULL,
        reason             TEXT,
        note               TEXT NOT NULL,
        created_at         INTEGER NOT NULL,
        updated_at         INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX snapshots_by_name ON snapshots (owner, name);
    CREATE INDEX snapshots_by_template ON snapshots (template) WHERE template IS NOT NULL;
    CREATE TABLE snapshot_tags (
        owner              TEXT NOT NULL,
        name               TEXT NOT NULL,
        tag                TEXT NOT NULL,
        snapshot           BLOB NOT NULL REFERENCES snapshots (id) ON DELETE CASCADE,
        PRIMARY KEY (owner, name, tag)
    ) WITHOUT ROWID;
    CREATE INDEX snapshot_tags_by_snapshot ON snapshot_tags (snapshot);
