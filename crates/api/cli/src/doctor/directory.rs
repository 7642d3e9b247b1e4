//! Whether peers can find each other.

use std::path::Path;

use rustix::fs::{access, Access};
use unbroken_directory::{RedisSettings, Settings};

use super::report::Line;

const CHECK: &str = "directory";

/// The runtime folder.
pub(crate) struct Folder<'a> {
    pub(crate) path: &'a Path,
    /// Whether it is there, or what is wrong with it.
    pub(crate) is_there: Result<bool, String>,
    /// Whether this user may make files in a folder.
    pub(crate) may_write: fn(&Path) -> bool,
}

/// Whether this user may make files in a folder.
pub(crate) fn may_write(folder: &Path) -> bool {
    access(folder, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

/// The directory that the settings name; `probe` asks a server.
pub(crate) fn directory(
    settings: Result<Settings, String>,
    folder: Folder<'_>,
    probe: impl Fn(&RedisSettings) -> Result<(), String>,
) -> Line {
    match settings {
        Err(why) => Line::problem(CHECK, why, "set UNBROKEN_DIRECTORY as it says, or unset it"),
        Ok(Settings::Lmdb) => embedded(folder),
        Ok(Settings::Redis(settings)) => match probe(&settings) {
            Ok(()) => Line::ok(CHECK, format!("{settings} answers")),
            Err(why) => Line::problem(
                CHECK,
                why,
                "start the server, or correct UNBROKEN_DIRECTORY; `redis-cli -h HOST ping` must \
                 answer from here, and from each peer",
            ),
        },
    }
}

fn embedded(folder: Folder<'_>) -> Line {
    let shown = folder.path.display();
    let is_there = match folder.is_there {
        Ok(is_there) => is_there,
        Err(why) => {
            let remedy =
                "name a folder of this user's own in UNBROKEN_RUNTIME, or `unbroken reset`";
            return Line::problem(CHECK, why, remedy);
        }
    };
    // What is not there yet is made in the first folder above that is.
    let above = || folder.path.ancestors().skip(1).find(|parent| parent.exists());
    let place = if is_there { Some(folder.path) } else { above() };
    if !place.is_some_and(folder.may_write) {
        return Line::problem(
            CHECK,
            format!("lmdb in {shown}: this user may not write there"),
            "name a folder of this user's own in UNBROKEN_RUNTIME",
        );
    }
    let made = if is_there { "" } else { ", which the first program makes" };
    Line::note(CHECK, format!("lmdb in {shown}{made}: for programs of this machine alone"))
        .and_do("between machines, both ends: UNBROKEN_DIRECTORY=redis://HOST")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::Level;

    fn lmdb(path: &Path, is_there: Result<bool, String>, may_write: fn(&Path) -> bool) -> Line {
        directory(Ok(Settings::Lmdb), Folder { path, is_there, may_write }, |_| {
            panic!("no server is named")
        })
    }

    #[test]
    fn a_folder_that_cannot_be_used_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let good = lmdb(folder.path(), Ok(true), may_write);
        assert_eq!(good.level, Level::Note);
        assert!(good.remedy.unwrap().contains("redis://HOST"));
        let later = lmdb(&folder.path().join("not/yet"), Ok(false), may_write);
        assert!(later.text.contains("which the first program makes"), "{later:?}");
        let foreign = Err("runtime folder /x: it belongs to user 7".to_string());
        let foreign = lmdb(Path::new("/x"), foreign, may_write);
        assert_eq!(foreign.level, Level::Problem);
        assert!(foreign.remedy.unwrap().contains("UNBROKEN_RUNTIME"));
        for is_there in [true, false] {
            let locked = lmdb(&folder.path().join("x"), Ok(is_there), |_| false);
            assert_eq!(locked.level, Level::Problem);
            assert!(locked.text.contains("may not write there"), "{locked:?}");
        }
    }

    #[test]
    fn a_server_that_does_not_answer_is_named() {
        let settings = || Settings::parse("redis://127.0.0.1:1/0").map_err(|e| e.to_string());
        let folder = || {
            let is_there = Err("not looked at".to_owned());
            Folder { path: Path::new("/x"), is_there, may_write }
        };
        let good = directory(settings(), folder(), |_| Ok(()));
        assert_eq!(good.level, Level::Ok);
        assert!(good.text.contains("redis://127.0.0.1:1/0"), "{good:?}");
        let probe =
            |s: &RedisSettings| unbroken_directory::Redis::probe(s).map_err(|e| e.to_string());
        let refused = directory(settings(), folder(), probe);
        assert_eq!(refused.level, Level::Problem);
        assert!(refused.text.contains("127.0.0.1:1"), "{refused:?}");
        assert!(refused.remedy.unwrap().contains("redis-cli"));
        let wrong = Settings::parse("mysql://x").map_err(|e| e.to_string());
        let wrong = directory(wrong, folder(), |_| Ok(()));
        assert!(wrong.level == Level::Problem && wrong.text.contains("mysql"), "{wrong:?}");
    }
}
