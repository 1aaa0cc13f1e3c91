    CREATE TABLE pools (
        id                 BLOB NOT NULL PRIMARY KEY,
        owner              TEXT NOT NULL,
        name               TEXT NOT NULL,
        -- NULL is the built-in one.
        template           BLOB REFERENCES templates (id),
        replicas           INTEGER NOT NULL,
        -- What the owner may have in all, as the key said that made the pool or scaled it.
        sandboxes_max      INTEGER,
        cpu_millis_max     INTEGER,
        memory_bytes_max   INTEGER,
        -- It is being deleted: nothing is claimed from it, and it goes when it is empty.
        going              INTEGER NOT NULL,
        created_at         INTEGER NOT NULL,
        updated_at         INTEGER NOT NULL,
        UNIQUE (owner, name)
    ) WITHOUT ROWID;
    CREATE INDEX pools_by_template ON pools (template) WHERE template IS NOT NULL;
    CREATE TABLE pool_members (
        sandbox            BLOB NOT NULL PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
        -- Where it waits; NULL once it is claimed.
        pool               BLOB REFERENCES pools (id),
        -- What that was called when it was claimed.
        claimed_from       TEXT,
        CHECK ((pool IS NULL) = (claimed_from IS NOT NULL))
    ) WITHOUT ROWID;
    CREATE INDEX pool_members_by_pool ON pool_members (pool) WHERE pool IS NOT NULL;
