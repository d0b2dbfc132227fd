//go:build !amd64

package jail

import "golang.org/x/sys/unix"

const fstatat = unix.SYS_FSTATAT
