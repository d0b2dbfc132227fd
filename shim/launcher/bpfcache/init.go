//go:build cgo && seccomp

package bpfcache

// #include <stdlib.h>
// #include "laststep.h"
import "C"

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

// startInitialization does all of libcontainer's work in init. It returns only after a failure. The
// error is nil if the launcher already has it.
//
//go:linkname startInitialization github.com/opencontainers/runc/libcontainer.startInitialization
func startInitialization() error

// prepareEnv returns the environment with which libcontainer executes the command.
//
//go:linkname prepareEnv github.com/opencontainers/runc/libcontainer.prepareEnv
func prepareEnv(env []string, uid int) ([]string, error)

// Init continues libcontainer in the first process of a container, and of an exec, in place of
// libcontainer.Init. It does not return.
func Init() {
	runtime.GOMAXPROCS(1)
	runtime.LockOSThread()
	command, err := takeOver()
	if err != nil {
		fmt.Fprintln(os.Stderr, "seccomp filter:", err)
		os.Exit(255)
	}
	err = startInitialization()
	var refused *os.PathError
	if command != nil && errors.As(err, &refused) && refused.Op == "exec" && errors.Is(refused.Err, unix.EINVAL) {
		err = command.execute(refused.Path)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(255)
}

// command is the command to execute after libcontainer's work.
type command struct {
	*filter
	args, env []string
	uid       int
}

// initPipe is the variable with the number of the descriptor from which libcontainer's init reads
// its configuration.
const initPipe = "_LIBCONTAINER_INITPIPE"

// takeOver reads init's configuration and gives it to libcontainer without the seccomp profile. It
// returns nil if the process has no filter.
func takeOver() (*command, error) {
	fd, err := strconv.Atoi(os.Getenv(initPipe))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", initPipe, err)
	}
	pipe := os.NewFile(uintptr(fd), "init")
	defer pipe.Close() // it was only read, and nothing else comes
	var config map[string]json.RawMessage
	if err := json.NewDecoder(pipe).Decode(&config); err != nil {
		return nil, fmt.Errorf("read init's configuration: %w", err)
	}
	c, err := newCommand(config)
	if err != nil {
		return nil, err
	}
	if c != nil {
		if err := withoutFilter(config); err != nil {
			return nil, err
		}
	}
	return c, replaceInitPipe(config)
}

// newCommand returns the command of a configuration whose last argument is a filter, otherwise nil.
func newCommand(config map[string]json.RawMessage) (c *command, err error) {
	c = new(command)
	for name, to := range map[string]any{"args": &c.args, "env": &c.env, "uid": &c.uid} {
		if err := json.Unmarshal(config[name], to); err != nil {
			return nil, fmt.Errorf("init's %s: %w", name, err)
		}
	}
	if len(c.args) == 0 {
		return nil, nil
	}
	last := len(c.args) - 1
	carried, ok := strings.CutPrefix(c.args[last], carrierPrefix)
	if !ok {
		return nil, nil
	}
	encoded, err := base64.StdEncoding.DecodeString(carried)
	if err != nil {
		return nil, err
	}
	c.args = c.args[:last]
	c.filter, err = decode(encoded)
	return c, err
}

// withoutFilter removes the profile from init's configuration. If no_new_privs is not set, it adds
// the capability to install a filter, until the execve. See the package's comment.
func withoutFilter(config map[string]json.RawMessage) (err error) {
	var container map[string]json.RawMessage
	if err := json.Unmarshal(config["config"], &container); err != nil {
		return fmt.Errorf("the container's configuration: %w", err)
	}
	delete(container, "seccomp")
	if config["config"], err = json.Marshal(container); err != nil {
		return err
	}
	var noNewPrivileges bool
	if err := json.Unmarshal(config["no_new_privileges"], &noNewPrivileges); err != nil || noNewPrivileges {
		return err
	}
	var caps configs.Capabilities
	if err := json.Unmarshal(config["capabilities"], &caps); err != nil {
		return fmt.Errorf("init's capabilities: %w", err)
	}
	const needed = "CAP_SYS_ADMIN"
	caps.Permitted = append(caps.Permitted, needed)
	caps.Effective = append(caps.Effective, needed)
	config["capabilities"], err = json.Marshal(caps)
	return err
}

// replaceInitPipe makes libcontainer read this configuration. Like libcontainer's own
// configuration, it comes from a socket. Processes of the container can see init's descriptors.
// They may open files and pipes through them, but not sockets.
func replaceInitPipe(config map[string]json.RawMessage) error {
	data, err := json.Marshal(config)
	if err != nil {
		return err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socketpair", err)
	}
	ours := os.NewFile(uintptr(pair[1]), "init")
	// Usually all of it fits into the socket. A goroutine would have to wait for this process's only
	// P while libcontainer reads.
	sent, err := unix.SendmsgN(pair[1], data, nil, nil, unix.MSG_DONTWAIT)
	if err != nil {
		return errors.Join(os.NewSyscallError("sendmsg", err), ours.Close())
	}
	rest := data[sent:]
	if len(rest) == 0 {
		err = ours.Close()
	} else {
		go func() { // it ends when libcontainer has read everything, or with the process
			defer ours.Close()
			_, _ = ours.Write(rest) // libcontainer reports an error if it cannot read everything
		}()
	}
	return errors.Join(err, os.Setenv(initPipe, strconv.Itoa(pair[0])))
}

// execute installs the filter and executes the program at path. It returns only on an error before
// that. libcontainer has closed all files already.
func (c *command) execute(path string) error {
	env, err := prepareEnv(c.env, c.uid)
	if err != nil {
		return err
	}
	// Go's execve restores the limit of open files, which package os has raised. Go has no other
	// function for this purpose. So this calls execve for a program that does not exist.
	_ = unix.Exec("", []string{""}, nil)
	name := C.CString(path)
	C.laststep(unsafe.Pointer(unsafe.SliceData(c.program)), C.size_t(len(c.program)), C.uint(c.flags),
		name, vector(c.args), vector(env))
	panic("unreachable")
}

// vector returns strings in the form for execve. They are never freed, because execve replaces the
// memory.
func vector(list []string) **C.char {
	const pointer = unsafe.Sizeof(uintptr(0))
	first := (**C.char)(C.calloc(C.size_t(len(list)+1), C.size_t(pointer))) // it ends with NULL
	pointers := unsafe.Slice(first, len(list))
	for i, s := range list {
		pointers[i] = C.CString(s)
	}
	return first
}
