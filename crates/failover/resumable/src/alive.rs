//! Whether a device that has failed somebody is alive.

use std::time::Duration;
use unbroken_verbs::Device;

/// A device that dies may fail before its kernel tells of the death; that is there within this
/// time.
const DEATH_NEWS_MS: u32 = 20;

/// Whether a device that has failed somebody lives, once it has had the time to say that it does
/// not.
#[cold]
pub(crate) fn lives(device: &dyn Device) -> bool {
    for _ in 0..DEATH_NEWS_MS {
        device.drain();
        if !device.alive() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    device.alive()
}
