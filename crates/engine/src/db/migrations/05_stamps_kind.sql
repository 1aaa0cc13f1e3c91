    -- What the last use was; NULL in rows that are older than this.
    ALTER TABLE stamps ADD COLUMN kind TEXT;
