    -- What sandboxes may reach, and what they reached.

    -- The policy as the caller wrote it, in JSON. A sandbox without a row has no network.
    CREATE TABLE network_policies (
        sandbox         BLOB NOT NULL PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
        policy          TEXT NOT NULL
    ) WITHOUT ROWID;
    -- The names that a sandbox looked up. A name's place gives it its address, so neither ever changes.
    CREATE TABLE network_names (
        sandbox         BLOB NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        place           INTEGER NOT NULL,
        name            TEXT NOT NULL,
        PRIMARY KEY (sandbox, place)
    ) WITHOUT ROWID;
    -- Decisions and ends of connections. An event may be delivered twice, so it is unique by its contents.
    CREATE TABLE network_events (
        id              INTEGER PRIMARY KEY AUTOINCREMENT,
        sandbox         BLOB NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        at_ms           INTEGER NOT NULL,
        what            TEXT NOT NULL,
        name            TEXT NOT NULL,
        address         TEXT NOT NULL,
        port            INTEGER NOT NULL,
        protocol        TEXT NOT NULL,
        rule            TEXT NOT NULL,
        why             TEXT NOT NULL,
        opens           TEXT NOT NULL,
        sent            INTEGER NOT NULL,
        received        INTEGER NOT NULL,
        UNIQUE (sandbox, at_ms, what, name, address, port, sent, received)
    );
    CREATE INDEX network_events_by_sandbox ON network_events (sandbox, id);
    -- What a sandbox used, in all. The columns `_now` are those of the egress that serves it, which counts from zero.
    CREATE TABLE network_totals (
        sandbox         BLOB NOT NULL PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
        sent            INTEGER NOT NULL,
        received        INTEGER NOT NULL,
        connections     INTEGER NOT NULL,
        refused         INTEGER NOT NULL,
        sent_now        INTEGER NOT NULL,
        received_now    INTEGER NOT NULL,
        connections_now INTEGER NOT NULL,
        refused_now     INTEGER NOT NULL
    ) WITHOUT ROWID;

    -- The boot of the machine in which the last daemon ran. In another boot, no process of any sandbox is left.
    CREATE TABLE machine (
        id              INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
        boot            BLOB NOT NULL
    ) WITHOUT ROWID;
    -- Rules to pause were kept and did not act. They count from the first start that can pause, which has no time yet.
    INSERT INTO stamps (sandbox, since, wall_at, boot, since_boot)
        SELECT DISTINCT sandbox, 'acting', 0, zeroblob(16), 0 FROM rules
        WHERE action IN ('pause_keep_memory', 'pause_drop_memory');

    -- Snapshots, forks and history.

    -- What a snapshot is for: named (a caller asked for it), fork (its sandboxes were forked from it) or history (it was
    -- taken before a command).
    ALTER TABLE snapshots ADD COLUMN purpose TEXT NOT NULL DEFAULT 'named';
    ALTER TABLE snapshots ADD COLUMN labels TEXT NOT NULL DEFAULT '{}';
    -- The snapshot that its source began with, or was rolled back to.
    ALTER TABLE snapshots ADD COLUMN parent BLOB;
    -- Set once the store has its files. Others have their files in an image.
    ALTER TABLE snapshots ADD COLUMN subvolume INTEGER;
    ALTER TABLE snapshots ADD COLUMN changed INTEGER;
    ALTER TABLE snapshots ADD COLUMN size_bytes INTEGER;
    ALTER TABLE snapshots ADD COLUMN stopped_us INTEGER;
    CREATE INDEX snapshots_by_sandbox ON snapshots (sandbox) WHERE sandbox IS NOT NULL;
    -- The snapshots that a sandbox begins with which is made from this one, the uppermost first.
    CREATE TABLE snapshot_layers (
        snapshot           BLOB NOT NULL REFERENCES snapshots (id) ON DELETE CASCADE,
        position           INTEGER NOT NULL,
        layer              BLOB NOT NULL REFERENCES snapshots (id),
        -- layer, or copy: the sandbox's writable files begin as a copy of it.
        role               TEXT NOT NULL,
        PRIMARY KEY (snapshot, position)
    ) WITHOUT ROWID;
    CREATE INDEX snapshot_layers_by_layer ON snapshot_layers (layer);
    -- The snapshots that a sandbox lies over, likewise.
    CREATE TABLE sandbox_layers (
        sandbox            BLOB NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        position           INTEGER NOT NULL,
        layer              BLOB NOT NULL REFERENCES snapshots (id),
        role               TEXT NOT NULL,
        PRIMARY KEY (sandbox, position)
    ) WITHOUT ROWID;
    CREATE INDEX sandbox_layers_by_layer ON sandbox_layers (layer);
    -- Which sandbox was made from a snapshot of which. Rows stay while any sandbox of the family exists.
    CREATE TABLE lineage (
        sandbox            BLOB NOT NULL PRIMARY KEY,
        owner              TEXT NOT NULL,
        -- The name that a deleted sandbox had.
        name               TEXT NOT NULL,
        parent             BLOB,
        snapshot           BLOB,
        created_at         INTEGER NOT NULL,
        ended_at           INTEGER
    ) WITHOUT ROWID;
    CREATE INDEX lineage_by_parent ON lineage (parent) WHERE parent IS NOT NULL;
    -- How many snapshots are kept of a sandbox that takes one before each command.
    CREATE TABLE histories (
        sandbox            BLOB NOT NULL PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
        kept               INTEGER NOT NULL
    ) WITHOUT ROWID;

    -- Who has proved access to a downloaded layer. The empty owner is everyone.
    CREATE TABLE layer_access (
        layer              TEXT NOT NULL REFERENCES layers (layer) ON DELETE CASCADE,
        owner              TEXT NOT NULL,
        PRIMARY KEY (layer, owner)
    ) WITHOUT ROWID;
    INSERT INTO layer_access (layer, owner)
        SELECT DISTINCT image_layers.layer, image_names.owner
        FROM image_layers
        JOIN image_names ON image_names.image = image_layers.image
        JOIN layers ON layers.layer = image_layers.layer
        WHERE layers.contents IS NOT NULL;
    -- Limits and budgets of keys.
    ALTER TABLE keys ADD COLUMN disk_bytes_max INTEGER;
    ALTER TABLE keys ADD COLUMN volume_bytes_max INTEGER;
    ALTER TABLE keys ADD COLUMN output_bytes_max INTEGER;
    ALTER TABLE keys ADD COLUMN snapshots_max INTEGER;
    ALTER TABLE keys ADD COLUMN builds_max INTEGER;
    ALTER TABLE keys ADD COLUMN connections_max INTEGER;
    ALTER TABLE pools ADD COLUMN disk_bytes_max INTEGER;

    -- Links to ports of sandboxes.
    CREATE TABLE port_links (
        id                 BLOB NOT NULL PRIMARY KEY,
        sandbox            BLOB NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        owner              TEXT NOT NULL,
        port               INTEGER NOT NULL,
        -- The id of the key that made the link. The link ends with it.
        key                TEXT NOT NULL,
        label              TEXT,
        -- The only methods that it allows, separated by spaces; all if empty.
        methods            TEXT NOT NULL,
        -- Whether it opens the port to everybody.
        public             INTEGER NOT NULL,
        created_at         INTEGER NOT NULL,
        expires_at         INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX port_links_by_sandbox ON port_links (sandbox);
    CREATE INDEX port_links_by_expiry ON port_links (expires_at);
