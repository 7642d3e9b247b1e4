//! That nothing which ships has the feature `mutants`.
//!
//! Cargo gives a crate all features that any of the packages it builds together asks for. So no
//! manifest may ask for this one, tests' included: it is for the command line alone
//! (`cargo test-mutants`), and a build of the whole workspace is without it.

use serde_json::Value;

const FEATURE: &str = "mutants";

/// A line for each manifest that asks for the feature.
pub fn breaches(metadata: &Value) -> Vec<String> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut wrong = Vec::new();
    for package in list(&metadata["packages"]) {
        let name = package["name"].as_str().unwrap_or("?").to_string();
        let asked = list(&package["dependencies"]).into_iter().find(|dependency| {
            list(&dependency["features"]).iter().any(|feature| feature == FEATURE)
        });
        if let Some(dependency) = asked {
            wrong.push(format!(
                "{name} asks for the feature {FEATURE} of {}: name it on the command line",
                dependency["name"].as_str().unwrap_or("?")
            ));
        }
        let default = list(&package["features"]["default"]);
        if default.iter().any(|f| f.as_str().is_some_and(|f| f.ends_with(FEATURE))) {
            wrong.push(format!("{name} has the feature {FEATURE} by default"));
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn found(dependency_features: &[&str], default: &[&str]) -> Vec<String> {
        breaches(&json!({ "packages": [{
            "name": "a",
            "dependencies": [{ "name": "b", "features": dependency_features }],
            "features": { "default": default, "mutants": ["b/mutants"] },
        }]}))
    }

    #[test]
    fn who_asks_for_mutants_is_named() {
        assert!(found(&["std"], &["std"]).is_empty());
        assert!(found(&["mutants"], &[])[0].contains("a asks for the feature mutants of b"));
        assert!(found(&[], &["b/mutants"])[0].contains("by default"));
    }
}
