// Package lsm sets the kernel's security modules up for pods: it loads the AppArmor profile that
// RuntimeDefault stands for, and keeps and gives SELinux labels.
//
// # Contract
//
// What a pod gets is decided elsewhere (package oci); here is done to the host what that needs. On a host
// without the module nothing is done. The profile is loaded once for all who want it, and who waits for it waits
// a bounded time. Only files that were asked for are labelled anew. Labels that are in use are kept from
// being drawn again, also across a restart of the daemon.
package lsm
