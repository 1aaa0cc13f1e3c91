ALTER TABLE commands ADD COLUMN oom_kills_before INTEGER;
