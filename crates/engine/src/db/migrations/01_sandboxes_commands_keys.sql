    CREATE TABLE sandboxes (
        id              BLOB NOT NULL PRIMARY KEY,
        owner           TEXT NOT NULL,
        name            TEXT NOT NULL,
        template        TEXT NOT NULL,
        image           TEXT NOT NULL,
        cpu_millis      INTEGER NOT NULL,
        memory_bytes    INTEGER NOT NULL,
        pids            INTEGER NOT NULL,
        env             TEXT NOT NULL,
        state           TEXT NOT NULL,
        detail          TEXT NOT NULL,
        goal            TEXT NOT NULL,
        reason          TEXT,
        idempotency_key TEXT,
        request_digest  BLOB NOT NULL,
        oom_kills       INTEGER NOT NULL DEFAULT 0,
        created_at      INTEGER NOT NULL,
        UNIQUE (owner, name)
    ) WITHOUT ROWID;
    CREATE UNIQUE INDEX sandboxes_by_idempotency_key ON sandboxes (owner, idempotency_key)
        WHERE idempotency_key IS NOT NULL;
    CREATE TABLE commands (
        sandbox         BLOB NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        handle          INTEGER NOT NULL,
        id              TEXT NOT NULL,
        request_digest  BLOB NOT NULL,
        start           TEXT NOT NULL,
        created_at      INTEGER NOT NULL,
        ended_at        INTEGER,
        pid             INTEGER,
        outcome         TEXT,
        code            INTEGER,
        signal          INTEGER,
        start_error     TEXT,
        stdout_start    INTEGER,
        stdout_end      INTEGER,
        stderr_start    INTEGER,
        stderr_end      INTEGER,
        stdout_bytes    BLOB,
        stderr_bytes    BLOB,
        PRIMARY KEY (sandbox, handle),
        UNIQUE (sandbox, id)
    ) WITHOUT ROWID;
    CREATE TABLE keys (
        id              TEXT NOT NULL PRIMARY KEY,
        hash            BLOB NOT NULL,
        owner           TEXT NOT NULL,
        admin           INTEGER NOT NULL,
        sandboxes_max   INTEGER,
        cpu_millis_max  INTEGER,
        memory_bytes_max INTEGER,
        created_at      INTEGER NOT NULL
    ) WITHOUT ROWID;
