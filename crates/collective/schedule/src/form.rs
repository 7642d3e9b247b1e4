//! Ways of doing an operation by their names, for those who ask for one of them.
//!
//! A form is what tells one [`Choice`] from another in kind: the shape of trees, who owns what, the
//! order of hosts. Channels and chunks are the planner's ([`crate::planner::plan_as`]).
//!
//! | form | what happens | operations | reduces in order |
//! | --- | --- | --- | --- |
//! | `one-shot` | everyone sends everything to everyone | AllReduce, Barrier | yes |
//! | `direct` | everyone sends each part to its owner, who sends the result to everyone | all | yes |
//! | `stars` | the same; hosts own as much as suits what they carry ([`crate::reshape`]) | AllReduce, Barrier | yes |
//! | `ring` | a ring of hosts by number | all but pairwise ones | no |
//! | `bridged-ring` | a ring whose neighbours share rails ([`crate::rerank`]) | all but pairwise ones | no |
//! | `leaves` | rings on which slow hosts hang ([`crate::reshape`]) | AllReduce, Barrier | no |
//! | `r2ccl` | R²CCL's AllReduce: rings without slow hosts, then a broadcast ([`crate::paper`]) | AllReduce, Barrier | no |
//! | `tree` | binary trees, a root for each part | all but pairwise ones | no |
//! | `rooted-tree` | a binary tree with one root | AllReduce, Barrier | no |
//! | `flat-ring` | a ring of ranks, as NCCL's | all but pairwise ones | no |

use std::fmt;
use std::str::FromStr;

use crate::planner::LEAST_PIECE_BYTES;
use crate::{Choice, Folding, Grouping, Operation, Owners, Shape, Topology};

/// A way of doing an operation, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// Everyone sends everything to everyone.
    OneShot,
    /// Through owners of equal parts.
    Direct,
    /// Through owners of parts that suit what hosts carry.
    Stars,
    /// A ring of hosts by number.
    Ring,
    /// A ring of hosts whose neighbours share rails.
    BridgedRing,
    /// Rings on which slow hosts hang as leaves.
    Leaves,
    /// R²CCL's AllReduce. It divides the vector whenever a host carries less than others, also
    /// below the threshold up to which the paper's planner keeps the ring.
    R2ccl,
    /// Binary trees with a root for each part.
    Tree,
    /// A binary tree with one root.
    RootedTree,
    /// A ring of ranks.
    FlatRing,
}

impl Form {
    /// All.
    pub const ALL: [Form; 10] = [
        Form::OneShot,
        Form::Direct,
        Form::Stars,
        Form::Ring,
        Form::BridgedRing,
        Form::Leaves,
        Form::R2ccl,
        Form::Tree,
        Form::RootedTree,
        Form::FlatRing,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Form::OneShot => "one-shot",
            Form::Direct => "direct",
            Form::Stars => "stars",
            Form::Ring => "ring",
            Form::BridgedRing => "bridged-ring",
            Form::Leaves => "leaves",
            Form::R2ccl => "r2ccl",
            Form::Tree => "tree",
            Form::RootedTree => "rooted-tree",
            Form::FlatRing => "flat-ring",
        }
    }

    /// The names of all, with commas.
    pub fn names() -> String {
        Form::ALL.map(Form::name).join(", ")
    }

    /// Whether an operation can be done so.
    pub fn takes(self, operation: &Operation) -> bool {
        let all = matches!(operation, Operation::AllReduce { .. } | Operation::Barrier);
        match self {
            Form::Direct => true,
            Form::Ring | Form::BridgedRing | Form::Tree | Form::FlatRing => {
                !operation.is_pairwise()
            }
            Form::OneShot | Form::Stars | Form::Leaves | Form::R2ccl | Form::RootedTree => all,
        }
    }

    /// Whether contributions are reduced in the order of ranks ([`Folding::InOrder`]).
    pub fn reduces_in_order(self) -> bool {
        matches!(self, Form::OneShot | Form::Direct | Form::Stars)
    }

    /// The form of a choice.
    pub fn of(choice: &Choice) -> Form {
        match (choice.shape, &choice.owners, choice.grouping) {
            (Shape::OneShot, ..) => Form::OneShot,
            (Shape::Direct, Owners::ByCapacity, _) => Form::Stars,
            (Shape::Direct, ..) => Form::Direct,
            (Shape::SubRings, ..) => Form::R2ccl,
            (Shape::Ring, Owners::ByCapacity, _) => Form::Leaves,
            (Shape::Ring, _, Grouping::Ranks) => Form::FlatRing,
            (Shape::Ring, ..) if choice.ring.is_some() => Form::BridgedRing,
            (Shape::Ring, ..) => Form::Ring,
            (Shape::Tree, Owners::Weights(_), _) => Form::RootedTree,
            (Shape::Tree, ..) => Form::Tree,
        }
    }

    /// The choices that have this form, less their chunks. `bridged_ring` is that of the topology
    /// ([`crate::rerank`]).
    pub(crate) fn choices(
        self,
        topology: &Topology,
        bridged_ring: &[usize],
        folding: Folding,
    ) -> Vec<Choice> {
        let of = |shape, owners, channels| Choice {
            owners,
            channels,
            folding,
            ..Choice::new(shape, Grouping::Hosts)
        };
        let narrow_or_wide =
            |shape, owners: Owners| [Some(1), None].map(|c| of(shape, owners.clone(), c)).to_vec();
        let bridged = |choices: Vec<Choice>| {
            let ring = || Some(bridged_ring.to_vec());
            choices.into_iter().map(|c| Choice { ring: ring(), ..c }).collect()
        };
        match self {
            Form::OneShot => narrow_or_wide(Shape::OneShot, Owners::Equal),
            Form::Direct => narrow_or_wide(Shape::Direct, Owners::Equal),
            Form::Stars => {
                let [narrow, wide] = [Some(1), None].map(|channels| Choice {
                    divide_bytes: LEAST_PIECE_BYTES,
                    ..of(Shape::Direct, Owners::ByCapacity, channels)
                });
                vec![narrow, wide, of(Shape::Direct, Owners::ByCapacity, None)]
            }
            Form::Ring => narrow_or_wide(Shape::Ring, Owners::Equal),
            Form::BridgedRing => bridged(narrow_or_wide(Shape::Ring, Owners::Equal)),
            Form::Leaves => bridged(vec![of(Shape::Ring, Owners::ByCapacity, None)]),
            Form::R2ccl => bridged(vec![of(Shape::SubRings, Owners::ByCapacity, None)]),
            Form::Tree => narrow_or_wide(Shape::Tree, Owners::Equal),
            Form::RootedTree => {
                let mut first = vec![0; topology.hosts().len()];
                first[0] = 1;
                vec![of(Shape::Tree, Owners::Weights(first), Some(1))]
            }
            Form::FlatRing => {
                vec![Choice { folding, ..Choice::new(Shape::Ring, Grouping::Ranks) }]
            }
        }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Form {
    type Err = String;

    fn from_str(text: &str) -> Result<Form, String> {
        Form::ALL
            .into_iter()
            .find(|form| form.name() == text)
            .ok_or_else(|| format!("`{text}` is no shape; there are {}", Form::names()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fabric, Host, Nic};

    #[test]
    fn a_name_is_read_as_it_is_written() {
        for form in Form::ALL {
            assert_eq!(form.to_string().parse(), Ok(form));
        }
        let said = "rings".parse::<Form>().unwrap_err();
        assert!(said.contains("`rings` is no shape; there are one-shot, direct"), "{said}");
    }

    #[test]
    fn choices_have_the_form_that_they_were_made_for() {
        let t = Topology::uniform(3, 2, Host::new(2, Nic::new(100)), Fabric::RailOnly).unwrap();
        for form in Form::ALL {
            let choices = form.choices(&t, &[0, 1, 2], Folding::Any);
            assert!(!choices.is_empty());
            choices.iter().for_each(|choice| assert_eq!(Form::of(choice), form));
        }
    }
}
