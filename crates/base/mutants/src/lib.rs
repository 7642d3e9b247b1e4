//! How a test leaves out a rule of the code, to show that it would notice:
//! docs/internals/mutants.md.
//!
//! A crate with such rules has a module `mutants` with the enum `Mutation` of their names, and the
//! feature `mutants`, which nothing that ships has. A rule asks [`left_out!`] whether it is to be
//! left out. Without the feature, and outside of the crate's own unit tests, the answer is `false`,
//! and nothing is compared.
#![forbid(unsafe_code)]

/// Whether a test leaves out a rule: `left_out!(self.config.mutation, Rule)`. What is given is a
/// `Mutation` of the crate that asks, or an `Option` of one.
// The crate that asks is meant, by its own features and its own rules.
#[allow(clippy::crate_in_macro_def)]
#[macro_export]
macro_rules! left_out {
    ($mutation:expr, $rule:ident) => {{
        #[cfg(any(test, feature = "mutants"))]
        let left_out = ::core::option::Option::<crate::mutants::Mutation>::from($mutation)
            == ::core::option::Option::Some(crate::mutants::Mutation::$rule);
        #[cfg(not(any(test, feature = "mutants")))]
        let left_out = {
            let _ = $mutation;
            false
        };
        left_out
    }};
}

#[cfg(test)]
mod mutants {
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Mutation {
        None,
        Rule,
    }
}

#[cfg(test)]
mod tests {
    use crate::mutants::Mutation;

    #[test]
    fn a_rule_is_left_out_if_it_is_the_one_that_is_named() {
        let given = [Some(Mutation::Rule), Some(Mutation::None), None];
        assert_eq!(given.map(|given| left_out!(given, Rule)), [true, false, false]);
        assert_eq!(
            [Mutation::Rule, Mutation::None].map(|given| left_out!(given, Rule)),
            [true, false]
        );
    }
}
