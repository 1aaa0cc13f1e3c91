    -- Secrets that callers keep here, and what used them. (The table `secrets` holds those of the installation itself.)

    CREATE TABLE credentials (
        id                 BLOB NOT NULL PRIMARY KEY,
        owner              TEXT NOT NULL,
        name               TEXT NOT NULL,
        -- value, file or environment
        source             TEXT NOT NULL,
        -- The path or the variable; empty for a value.
        origin             TEXT NOT NULL,
        -- The encrypted value; empty for other sources.
        sealed             BLOB NOT NULL,
        -- The id of the key that encrypted it.
        key                TEXT NOT NULL,
        -- Destinations, variables and the prefix of placeholders, in JSON.
        rules              TEXT NOT NULL,
        cache_seconds      INTEGER NOT NULL,
        version            INTEGER NOT NULL,
        created_at         INTEGER NOT NULL,
        updated_at         INTEGER NOT NULL,
        UNIQUE (owner, name)
    ) WITHOUT ROWID;

    -- Requests that carried a secret. Each line's hash covers the line before, so a removed or changed line shows.
    CREATE TABLE ledger (
        number             INTEGER NOT NULL PRIMARY KEY,
        -- Egress's id of the record, which may arrive twice.
        record             BLOB NOT NULL UNIQUE,
        at_ms              INTEGER NOT NULL,
        owner              TEXT NOT NULL,
        sandbox            BLOB NOT NULL,
        secret             BLOB NOT NULL,
        secret_name        TEXT NOT NULL,
        host               TEXT NOT NULL,
        port               INTEGER NOT NULL,
        method             TEXT NOT NULL,
        path               TEXT NOT NULL,
        status             INTEGER NOT NULL,
        sent               INTEGER NOT NULL,
        received           INTEGER NOT NULL,
        hash               BLOB NOT NULL
    );
    CREATE INDEX ledger_by_owner ON ledger (owner, number);
    -- Where the chain begins and ends: the hash before the first kept line, and the last line.
    CREATE TABLE ledger_ends (
        id                 INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
        first_number       INTEGER NOT NULL,
        first_hash         BLOB NOT NULL,
        last_number        INTEGER NOT NULL,
        last_hash          BLOB NOT NULL
    ) WITHOUT ROWID;
