    CREATE TABLE layers (
        layer              TEXT NOT NULL PRIMARY KEY,
        blob               TEXT,
        contents           TEXT,
        size               INTEGER NOT NULL,
        entries            INTEGER NOT NULL,
        bytes              INTEGER NOT NULL,
        devices_skipped    INTEGER NOT NULL,
        owners_changed     INTEGER NOT NULL,
        attributes_dropped INTEGER NOT NULL,
        created_at         INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE images (
        digest             TEXT NOT NULL PRIMARY KEY,
        config             TEXT NOT NULL,
        created_at         INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE image_layers (
        image              TEXT NOT NULL REFERENCES images (digest) ON DELETE CASCADE,
        position           INTEGER NOT NULL,
        layer              TEXT NOT NULL REFERENCES layers (layer),
        PRIMARY KEY (image, position)
    ) WITHOUT ROWID;
    CREATE INDEX image_layers_by_layer ON image_layers (layer);
    CREATE TABLE image_names (
        -- The empty owner is everyone.
        owner              TEXT NOT NULL,
        name               TEXT NOT NULL,
        image              TEXT NOT NULL REFERENCES images (digest),
        named_at           INTEGER NOT NULL,
        PRIMARY KEY (owner, name)
    ) WITHOUT ROWID;
    CREATE INDEX image_names_by_image ON image_names (image);
    CREATE TABLE image_aliases (
        name               TEXT NOT NULL PRIMARY KEY,
        target             TEXT NOT NULL,
        created_at         INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE sandbox_images (
        sandbox            BLOB NOT NULL PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
        image              TEXT REFERENCES images (digest),
        alias              TEXT
    ) WITHOUT ROWID;
    CREATE INDEX sandbox_images_by_image ON sandbox_images (image) WHERE image IS NOT NULL;
