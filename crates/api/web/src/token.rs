//! Tokens: what a client sends to be let in.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use unbroken_runtime::{fill_random, open_own};

use crate::error::{Result, WebError};

/// The shortest token that is taken, in characters, and the longest file.
const MIN_CHARS: usize = 16;
const MAX_BYTES: u64 = 4096;

/// A token that nobody can guess: 32 hexadecimal digits.
pub fn new_token() -> std::io::Result<Arc<str>> {
    let mut bytes = [0; 16];
    fill_random(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into())
}

/// The token in a file: its first line. The file must be this user's, and no link.
pub fn read_token(path: &Path) -> Result<Arc<str>> {
    let failed = |why: String| WebError::Token { path: path.display().to_string(), why };
    let file = open_own(path, OpenOptions::new().read(true)).map_err(|e| failed(e.to_string()))?;
    let mode = file.metadata().map_err(|e| failed(e.to_string()))?.permissions().mode();
    if mode & 0o077 != 0 {
        let right = format!("others may use it (mode {:o}); chmod 600 is right", mode & 0o777);
        return Err(failed(right));
    }
    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text).map_err(|e| failed(e.to_string()))?;
    let token = text.lines().next().unwrap_or_default().trim();
    if token.len() < MIN_CHARS || !token.chars().all(|c| c.is_ascii_graphic()) {
        return Err(failed(format!(
            "its first line must have {MIN_CHARS} or more printable characters, as \
             `openssl rand -hex 16` gives"
        )));
    }
    Ok(token.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_from_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "0123456789abcdef\nmore\n").unwrap();
        let mode = |mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&path, mode).unwrap();
        };
        mode(0o644);
        assert!(read_token(&path).unwrap_err().to_string().contains("chmod 600"));
        mode(0o600);
        assert_eq!(&*read_token(&path).unwrap(), "0123456789abcdef");
        for wrong in ["", "short", "with a space in it, and long", "0123456789abcde\u{e9}fghi"] {
            std::fs::write(&path, wrong).unwrap();
            assert!(read_token(&path).unwrap_err().to_string().contains("16 or more"), "{wrong}");
        }
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(read_token(&link).unwrap_err().to_string().contains("symbolic link"));
    }

    #[test]
    fn new_tokens_differ() {
        let (one, other) = (new_token().unwrap(), new_token().unwrap());
        assert!(one.len() == 32 && one != other);
    }
}
