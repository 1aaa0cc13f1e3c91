    -- What a goal to pause keeps: frozen, saved or dropped. NULL for every other goal.
    ALTER TABLE sandboxes ADD COLUMN goal_kept TEXT;
    -- Who may find the sandbox: visible, pool_member or build.
    ALTER TABLE sandboxes ADD COLUMN visibility TEXT NOT NULL DEFAULT 'visible';
    -- The build that a sandbox of a step belongs to.
    ALTER TABLE sandboxes ADD COLUMN build BLOB;
    -- The daemon that owns the row, and how often the row has changed its owner.
    ALTER TABLE sandboxes ADD COLUMN worker TEXT NOT NULL DEFAULT 'local';
    ALTER TABLE sandboxes ADD COLUMN generation INTEGER NOT NULL DEFAULT 1;
    -- What the sandbox is called on the host: its cgroup, its socket, its directories, its range of ids.
    ALTER TABLE sandboxes ADD COLUMN incarnation BLOB NOT NULL DEFAULT x'';
    UPDATE sandboxes SET incarnation = id;
    UPDATE sandboxes SET goal_kept = CASE WHEN detail IN ('frozen', 'saved', 'dropped') THEN detail ELSE 'frozen' END
        WHERE goal = 'paused';
    UPDATE sandboxes SET visibility = 'pool_member'
        WHERE EXISTS (SELECT 1 FROM pool_members WHERE sandbox = sandboxes.id AND pool IS NOT NULL);
    -- Sandboxes of builds were known by a label with the build's id and by their idempotency key.
    WITH spelled AS (
        SELECT id, owner, lower(hex(id)) AS digits FROM builds
    ), named AS (
        SELECT id, owner, substr(digits, 1, 8) || '-' || substr(digits, 9, 4) || '-' || substr(digits, 13, 4) || '-' ||
                          substr(digits, 17, 4) || '-' || substr(digits, 21, 12) AS name
        FROM spelled
    )
    UPDATE sandboxes SET visibility = 'build', build = named.id, idempotency_key = NULL
        FROM named
        WHERE sandboxes.owner = named.owner
          AND sandboxes.idempotency_key LIKE 'shoal build ' || named.name || ' %'
          AND EXISTS (SELECT 1 FROM labels WHERE sandbox = sandboxes.id AND key = 'shoal.build' AND value = named.name);
    CREATE UNIQUE INDEX sandboxes_by_incarnation ON sandboxes (incarnation);
