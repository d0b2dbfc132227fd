//go:build !amd64

package confine

import "golang.org/x/sys/unix"

const fstatat = unix.SYS_FSTATAT
