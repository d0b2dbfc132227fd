//go:build !cgo || !seccomp

package bpfcache

import (
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
)

// libcontainer makes no filters without libseccomp.
func compile(*configs.Seccomp) (*filter, error) { return nil, nil }

// Init continues libcontainer in the first process of a container, and of an exec.
func Init() { libcontainer.Init() }
