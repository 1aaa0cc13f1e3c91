//! Pools, as they come in and go out.

use engine::pools::{PoolInfo, PoolMember, PoolName, PoolState, PoolUpdate, Standing};
use wire::api;

use crate::clock::rfc3339;
use crate::error::ApiError;

/// `PATCH /v1/pools/{pool}`
pub fn pool_update(body: api::UpdatePool) -> Result<PoolUpdate, ApiError> {
    let api::UpdatePool { name, replicas } = body;
    Ok(PoolUpdate { name: name.as_deref().map(PoolName::parse).transpose()?, replicas })
}

/// A pool as clients see it, without what waits in it.
pub fn pool_listed(pool: PoolInfo) -> api::Pool {
    api::Pool { members: None, ..self::pool(pool) }
}

/// A pool as clients see it.
pub fn pool(pool: PoolInfo) -> api::Pool {
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    api::Pool {
        ready: count(pool.ready()),
        making: count(pool.making()),
        id: pool.id.to_string(),
        name: pool.name.to_string(),
        template: pool.template,
        template_version: pool.template_version,
        replicas: pool.replicas,
        state: match pool.state {
            PoolState::Ready => api::PoolState::Ready,
            PoolState::Filling => api::PoolState::Filling,
            PoolState::Failing => api::PoolState::Failing,
            PoolState::Deleting => api::PoolState::Deleting,
        },
        reason: pool.reason,
        retry_at: pool.retry_at.map(rfc3339),
        members: Some(pool.members.into_iter().map(member).collect()),
        claims: pool.claims,
        misses: pool.misses,
        created_at: rfc3339(pool.created_at),
        updated_at: rfc3339(pool.updated_at),
    }
}

fn member(member: PoolMember) -> api::PoolMember {
    api::PoolMember {
        id: member.id,
        name: member.name,
        state: match member.standing {
            Standing::Making => api::PoolMemberState::Making,
            Standing::Ready => api::PoolMemberState::Ready,
            Standing::Broken => api::PoolMemberState::Broken,
            Standing::Going => api::PoolMemberState::Deleting,
        },
        template_version: member.template_version,
        created_at: rfc3339(member.created_at),
    }
}
