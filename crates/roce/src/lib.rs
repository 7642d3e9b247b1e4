//! roce
