//! What a work request may have, however it is posted.

use unbroken_types::SendFlags;

/// The most bytes that a WR may carry inline: they are gathered on the stack.
pub const MAX_INLINE: usize = 512;

/// Send flags that exist here.
pub const KNOWN_FLAGS: u32 = SendFlags::FENCE.0
    | SendFlags::SIGNALED.0
    | SendFlags::SOLICITED.0
    | SendFlags::INLINE.0
    | SendFlags::NO_REPLAY.0;
