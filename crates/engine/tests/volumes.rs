//! Volumes on a fake host.

use crate::common::{World, key, owner};
use engine::volume::{VolumeName, VolumeSpec, VolumeUpdate};
use shoal_engine as engine;

const MIB: u64 = 1 << 20;

#[tokio::test]
async fn a_size_that_cannot_be_written_down_is_undone() {
    let world = World::new().await;
    let name = VolumeName::parse("v").expect("a name");
    let spec = VolumeSpec { name, size_bytes: 2 * MIB, from: None };
    let volume = world.engine.create_volume(&key(), spec).await.expect("it is created");
    let db = rusqlite::Connection::open(world.directory.path().join("shoal.db")).expect("a database");
    db.execute_batch(
        "CREATE TRIGGER broken BEFORE UPDATE ON volumes BEGIN SELECT RAISE(ABORT, 'broken'); END",
    )
    .expect("a trigger");
    let update = || VolumeUpdate { name: None, size_bytes: Some(4 * MIB) };
    world.engine.update_volume(&owner(), "v", update()).await.expect_err("the row cannot be written");
    assert_eq!(world.host.volume_size(volume.id), Some(2 * MIB));
    db.execute_batch("DROP TRIGGER broken").expect("no trigger");
    let changed = world.engine.update_volume(&owner(), "v", update()).await.expect("it is changed");
    assert_eq!((changed.size_bytes, world.host.volume_size(volume.id)), (4 * MIB, Some(4 * MIB)));
}
