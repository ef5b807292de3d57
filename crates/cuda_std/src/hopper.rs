//! sm_90a only: TMA, wgmma, mbarriers, clusters.
