    -- Whether the snapshot that a sandbox's history has before the command could not be taken.
    ALTER TABLE commands ADD COLUMN not_undoable INTEGER NOT NULL DEFAULT 0;
