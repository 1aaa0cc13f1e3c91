    -- Events, and those who are told of them.

    -- What the positions of an owner's events are counted from.
    CREATE TABLE event_logs (
        owner              TEXT NOT NULL PRIMARY KEY,
        start              INTEGER NOT NULL
    ) WITHOUT ROWID;
    -- The last events of each owner, in JSON. Numbers rise, with gaps.
    CREATE TABLE events (
        owner              TEXT NOT NULL,
        serial             INTEGER NOT NULL,
        at                 INTEGER NOT NULL,
        -- Set if it is about a sandbox, which may be gone.
        sandbox            BLOB,
        what               TEXT NOT NULL,
        PRIMARY KEY (owner, serial)
    ) WITHOUT ROWID;
    CREATE TABLE webhooks (
        id                 BLOB NOT NULL PRIMARY KEY,
        owner              TEXT NOT NULL,
        url                TEXT NOT NULL,
        -- What deliveries are signed with.
        secret             BLOB NOT NULL,
        -- The kinds of events that it is for, separated by spaces; all if empty.
        kinds              TEXT NOT NULL,
        -- Whether it may lead to addresses that are not on the public internet.
        anywhere           INTEGER NOT NULL,
        created_at         INTEGER NOT NULL,
        -- The last event that was delivered, given up or not meant.
        start              INTEGER NOT NULL,
        serial             INTEGER NOT NULL,
        -- Attempts since the last success, when the first of them was, and what the last of them said.
        attempts           INTEGER NOT NULL DEFAULT 0,
        failing_since      INTEGER,
        last_error         TEXT,
        delivered_at       INTEGER
    ) WITHOUT ROWID;
    CREATE INDEX webhooks_by_owner ON webhooks (owner);
    -- Deliveries that were given up, with their bodies.
    CREATE TABLE webhook_dead_letters (
        webhook            BLOB NOT NULL REFERENCES webhooks (id) ON DELETE CASCADE,
        serial             INTEGER NOT NULL,
        event              TEXT NOT NULL,
        given_up_at        INTEGER NOT NULL,
        attempts           INTEGER NOT NULL,
        reason             TEXT NOT NULL,
        body               TEXT NOT NULL,
        PRIMARY KEY (webhook, serial)
    ) WITHOUT ROWID;

    -- Commands that run in a sandbox when something is done to it.
    CREATE TABLE sandbox_hooks (
        sandbox            BLOB NOT NULL PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
        -- In JSON.
        hooks              TEXT NOT NULL,
        -- The hook that is to run next, or was running when its daemon died.
        due                TEXT,
        -- How the last run of each hook went, in JSON.
        runs               TEXT NOT NULL DEFAULT '{}'
    ) WITHOUT ROWID;
