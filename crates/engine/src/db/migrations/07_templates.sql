    CREATE TABLE templates (
        id                 BLOB NOT NULL PRIMARY KEY,
        owner              TEXT NOT NULL,
        name               TEXT NOT NULL,
        -- The newest.
        version            INTEGER NOT NULL,
        created_at         INTEGER NOT NULL,
        UNIQUE (owner, name)
    ) WITHOUT ROWID;
    CREATE TABLE template_versions (
        template           BLOB NOT NULL REFERENCES templates (id) ON DELETE CASCADE,
        version            INTEGER NOT NULL,
        spec               TEXT NOT NULL,
        state              TEXT NOT NULL,
        reason             TEXT,
        -- What the image's name meant, and just which image that was.
        resolved           TEXT,
        image              TEXT REFERENCES images (digest),
        made_at            INTEGER NOT NULL,
        PRIMARY KEY (template, version)
    ) WITHOUT ROWID;
    CREATE INDEX template_versions_by_image ON template_versions (image) WHERE image IS NOT NULL;
    CREATE TABLE sandbox_templates (
        sandbox            BLOB NOT NULL PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
        template           BLOB NOT NULL,
        version            INTEGER NOT NULL,
        FOREIGN KEY (template, version) REFERENCES template_versions (template, version)
    ) WITHOUT ROWID;
    CREATE INDEX sandbox_templates_by_version ON sandbox_templates (template, version);
