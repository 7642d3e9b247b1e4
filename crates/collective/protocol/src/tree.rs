//! The tree of ranks along which news go: from each to its father and its sons.

use crate::Rank;

/// Sons of a node of the tree that news goes along.
const SONS: usize = 2;

/// The rank that is next on the way to rank 0.
pub(crate) fn father(me: Rank) -> Option<Rank> {
    me.checked_sub(1).map(|m| m / SONS)
}

/// The ranks that this one hands news to.
pub(crate) fn neighbours(me: Rank, ranks: usize) -> impl Iterator<Item = Rank> {
    let sons = (1..=SONS).map(move |k| SONS * me + k).filter(move |son| *son < ranks);
    father(me).into_iter().chain(sons)
}
