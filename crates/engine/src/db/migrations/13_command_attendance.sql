    -- For how long nobody may be attached to a command, and for how long it is kept; NULL is forever.
    ALTER TABLE commands ADD COLUMN unattended_ms INTEGER;
    ALTER TABLE commands ADD COLUMN kept_ms INTEGER;
    CREATE INDEX commands_by_expiry ON commands (ended_at) WHERE kept_ms IS NOT NULL;
