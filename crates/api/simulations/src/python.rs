//! What Python's `unbroken.simulate` calls, over ctypes. It is no interface for others: texts and
//! functions change with the package, which is in the same wheel.
//!
//! A question is opened, answered and closed. While it is answered, other threads may ask how far
//! it is, or stop it. All texts are JSON: `{"ok": …}` or `{"error": {"kind", "argument", "text"}}`.
//!
//! No panic crosses the boundary: it becomes an error.
#![allow(unsafe_code)]

use std::ffi::{c_char, CStr, CString};
use std::panic::{catch_unwind, AssertUnwindSafe};

use serde::{Deserialize, Serialize};
use serde_json::{json, Value};

use crate::question::Question;
use crate::sweep::{Line, Sweep, Work};
use crate::{month, plan, run, serve, Error, Kind, Result, Watch};

/// A question that is asked.
struct Asked {
    what: What,
    watch: Watch,
}

enum What {
    Question(Box<Question>),
    Sweep(Box<Sweep>),
    Work(Box<Work>),
}

/// How Python asks.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Text {
    /// The words of a question.
    Words(Vec<String>),
    /// A part of a sweep.
    Work(Box<Work>),
}

impl Asked {
    fn open(text: &str) -> Result<Asked> {
        let watch = Watch::default();
        let what = match read::<Text>(text)? {
            Text::Work(work) => What::Work(work),
            Text::Words(words) => match Question::read(words)? {
                Question::Sweep(args) => What::Sweep(Box::new(Sweep::open(&args, &watch)?)),
                question => What::Question(Box::new(question)),
            },
        };
        Ok(Asked { what, watch })
    }

    fn answer(&self) -> Result<Value> {
        let watch = &self.watch;
        match &self.what {
            What::Work(work) => value(&work.lines(watch)?),
            What::Sweep(sweep) => {
                sweep.finish(watch)?;
                value(&sweep.report())
            }
            What::Question(question) => match &**question {
                Question::Plan(args) => value(&plan::plan(args, watch)?.1),
                Question::Run(args) => value(&run::run(args, watch)?.1),
                Question::Month(args) => value(&month::month(args, watch)?.1),
                Question::Serve(args) => value(&serve::serve(args, watch)?),
                Question::Sweep(_) => Err(defect("a sweep was not opened")),
            },
        }
    }

    fn sweep(&self) -> Result<&Sweep> {
        match &self.what {
            What::Sweep(sweep) => Ok(sweep),
            _ => Err(defect("this question is no sweep")),
        }
    }
}

fn defect(what: &str) -> Error {
    let text = format!("a defect of this library: {what}; please report it");
    Error { kind: Kind::Defect, argument: None, text }
}

fn read<T: for<'de> Deserialize<'de>>(text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| defect(&e.to_string()))
}

fn value(of: &impl Serialize) -> Result<Value> {
    serde_json::to_value(of).map_err(|e| defect(&e.to_string()))
}

/// What a function gives, as a text that [`unbroken_simulations_free`] takes back.
fn told(run: impl FnOnce() -> Result<Value>) -> *mut c_char {
    let found = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(defect("a panic")));
    let text = match found {
        Ok(value) => json!({ "ok": value }),
        Err(error) => json!({ "error": error }),
    };
    // JSON escapes zero bytes
    CString::new(text.to_string()).unwrap_or_default().into_raw()
}

/// # Safety
/// It points to a string.
unsafe fn text<'a>(pointer: *const c_char) -> Result<&'a str> {
    // SAFETY: as the caller says.
    unsafe { CStr::from_ptr(pointer) }.to_str().map_err(|e| defect(&e.to_string()))
}

/// Opens a question, and puts it to `place`; NULL there if it is refused.
///
/// # Safety
/// `question` is a string, and a pointer may be written to `place`.
#[no_mangle]
unsafe extern "C" fn unbroken_simulations_open(
    question: *const c_char,
    place: *mut *mut Asked,
) -> *mut c_char {
    told(|| {
        // SAFETY: as the caller says.
        let asked = unsafe { text(question) }.and_then(Asked::open);
        let (pointer, result) = match asked {
            Ok(asked) => (Box::into_raw(Box::new(asked)), Ok(Value::Null)),
            Err(e) => (std::ptr::null_mut(), Err(e)),
        };
        // SAFETY: as the caller says.
        unsafe { place.write(pointer) };
        result
    })
}

/// Answers a question; of a sweep, computes what is missing before.
///
/// # Safety
/// The question is open.
#[no_mangle]
unsafe extern "C" fn unbroken_simulations_answer(asked: *const Asked) -> *mut c_char {
    // SAFETY: as the caller says; it is changed behind locks and atomics alone.
    let asked = unsafe { &*asked };
    told(|| asked.answer())
}

/// What of a sweep is left to do.
///
/// # Safety
/// The question is open.
#[no_mangle]
unsafe extern "C" fn unbroken_simulations_missing(asked: *const Asked) -> *mut c_char {
    // SAFETY: as the caller says; it is changed behind locks and atomics alone.
    let asked = unsafe { &*asked };
    told(|| value(&asked.sweep()?.missing()))
}

/// Adds results to a sweep.
///
/// # Safety
/// The question is open, and `lines` is a string.
#[no_mangle]
unsafe extern "C" fn unbroken_simulations_add(
    asked: *const Asked,
    lines: *const c_char,
) -> *mut c_char {
    // SAFETY: as the caller says; it is changed behind locks and atomics alone.
    let asked = unsafe { &*asked };
    told(|| {
        // SAFETY: as the caller says.
        let lines: Vec<Line> = read(unsafe { text(lines) }?)?;
        asked.sweep()?.add(&lines, &asked.watch)?;
        Ok(Value::Null)
    })
}

/// How far a question is.
///
/// # Safety
/// The question is open, and numbers may be written to `done` and `all`.
#[no_mangle]
unsafe extern "C" fn unbroken_simulations_far(asked: *const Asked, done: *mut u64, all: *mut u64) {
    // SAFETY: as the caller says; it is changed behind locks and atomics alone.
    let far = unsafe { &*asked }.watch.far();
    // SAFETY: as the caller says.
    unsafe {
        done.write(far.0);
        all.write(far.1);
    }
}

/// The answer of a question is not wanted any longer.
///
/// # Safety
/// The question is open.
#[no_mangle]
unsafe extern "C" fn unbroken_simulations_stop(asked: *const Asked) {
    // SAFETY: as the caller says; it is changed behind locks and atomics alone.
    unsafe { &*asked }.watch.stop();
}

/// Closes a question.
///
/// # Safety
/// The question is open, and no other call has it.
#[no_mangle]
unsafe extern "C" fn unbroken_simulations_close(asked: *mut Asked) {
    // SAFETY: as the caller says, and `open` made it of a box.
    drop(unsafe { Box::from_raw(asked) });
}

/// Takes a text back.
///
/// # Safety
/// It is one that these functions gave, and nobody uses it any longer.
#[no_mangle]
unsafe extern "C" fn unbroken_simulations_free(text: *mut c_char) {
    // SAFETY: as the caller says, and `told` made it of a string.
    drop(unsafe { CString::from_raw(text) });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(text: &str) -> Result<Asked> {
        Asked::open(text)
    }

    #[test]
    fn each_question_has_an_answer() {
        for (words, key) in [
            (r#"{"words": ["plan", "--hosts=4"]}"#, "collectives"),
            (r#"{"words": ["run", "--hosts=4", "--fail=host0/nic0@1h", "--for=2h"]}"#, "changes"),
            (r#"{"words": ["sweep", "--hosts=4", "--lost=1", "--patterns=2"]}"#, "rows"),
            (r#"{"words": ["month", "--hosts=4", "--runs=2"]}"#, "rates"),
            (r#"{"words": ["serve", "--rate=0.1", "--for=60s"]}"#, "serving"),
        ] {
            let asked = asked(words).unwrap();
            assert!(asked.answer().unwrap().get(key).is_some(), "{words}");
            let (done, all) = asked.watch.far();
            assert!(done == all && all > 0, "{words}: {done} of {all}");
        }
    }

    #[test]
    fn one_that_is_stopped_has_none() {
        for words in [
            r#"{"words": ["plan", "--hosts=4"]}"#,
            r#"{"words": ["run", "--hosts=4", "--fail=host0/nic0@1h", "--for=2h"]}"#,
            r#"{"words": ["sweep", "--hosts=4", "--lost=1", "--patterns=2"]}"#,
            r#"{"words": ["month", "--hosts=4", "--runs=2"]}"#,
            r#"{"words": ["serve", "--rate=0.1", "--for=60s"]}"#,
        ] {
            let asked = asked(words).unwrap();
            asked.watch.stop();
            assert_eq!(asked.answer().unwrap_err().kind, Kind::Stopped, "{words}");
        }
    }

    #[test]
    fn texts_of_any_kind_are_refused_and_not_believed() {
        for text in ["", "{", "[]", r#"{"words": "plan"}"#, r#"{"work": {}}"#, r#"{"play": []}"#] {
            assert_eq!(asked(text).err().unwrap().kind, Kind::Defect, "{text}");
        }
        let plan = asked(r#"{"words": ["plan"]}"#).unwrap();
        assert_eq!(plan.sweep().err().unwrap().kind, Kind::Defect);
    }

    #[test]
    fn a_panic_becomes_an_error() {
        let pointer = told(|| panic!("on purpose"));
        // SAFETY: it is a string of `told`.
        let said = unsafe { text(pointer) }.unwrap().to_string();
        assert!(said.contains("\"kind\":\"defect\"") && said.contains("a panic"), "{said}");
        // SAFETY: it is one of `told`, and not used any longer.
        unsafe { unbroken_simulations_free(pointer) };
    }
}
