// Package lsm prepares the kernel's security modules for pods. It loads the AppArmor profile of
// RuntimeDefault, and reserves and sets SELinux labels.
// # Contract
//
// Package oci decides the profile and labels of a pod. This package applies them to the host. If
// the host does not have the security module, it does nothing. Concurrent callers load the profile
// once and wait for a limited time. Files are relabelled only if the config requests it. Labels in
// use stay reserved, even after a restart of the daemon.
package lsm
