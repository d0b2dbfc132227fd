package shim

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/cgroup"
	"berth/internal/errdefs"
	"berth/shim/proto"
)

// needCRIU skips a test where there is no CRIU, or for containers of another runtime.
func needCRIU(t *testing.T) string {
	t.Helper()
	path := os.Getenv("BERTH_TEST_CRIU")
	if path == "" {
		t.Skip("NOT TESTED: no CRIU (BERTH_TEST_CRIU)")
	}
	if os.Getenv(runtimeEnv) != "" {
		t.Skip("only libcontainer's containers are dumped")
	}
	return path
}

// dumpDir makes an empty directory and returns it with a dump request.
func (c *container) dumpDir(criu string) (string, *proto.Dump) {
	c.Helper()
	dir := filepath.Join(c.dir, c.ID+"-dump")
	if err := os.Mkdir(dir, 0o700); err != nil {
		c.Fatal(err)
	}
	f, err := os.Open(dir)
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() { f.Close() })
	return dir, &proto.Dump{ID: c.ID, CRIU: criu, Dir: f}
}

func (c *container) prepareDump(req *proto.Dump) *Dump {
	c.Helper()
	d, err := c.PrepareDump(c.ctx, req)
	if err != nil {
		c.Fatal(err)
	}
	return d
}

// noCRIU checks that nothing of CRIU is left.
func (c *container) noCRIU() {
	c.Helper()
	if left, err := LeftDumps(); err != nil || len(left) > 0 {
		c.Errorf("cgroups of CRIU are left: %v, %v", left, err)
	}
}

func TestDump(t *testing.T) {
	criu := needCRIU(t)
	e := newEnv(t)
	c := e.runCounter("dumped")
	dir, req := c.dumpDir(criu)
	d := c.prepareDump(req)
	began := time.Now()
	f := c.freezeFor(time.Minute)
	if err := d.Run(c.ctx); err != nil {
		t.Error(err)
	}
	if !c.frozenState() {
		t.Error("CRIU has left the container thawed")
	}
	if err := f.Thaw(); err != nil {
		t.Error(err)
	}
	t.Logf("frozen for %v", time.Since(began))
	c.goesOn("after a dump")
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	c.noCRIU()
	for _, name := range []string{"checkpoint/inventory.img", "checkpoint/pages-1.img", "checkpoint/descriptors.json", "dump.log", "stats-dump"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
	data, err := os.ReadFile(filepath.Join(dir, "checkpoint/descriptors.json"))
	var names []string
	if err := errors.Join(err, json.Unmarshal(data, &names)); err != nil || len(names) != 3 ||
		names[0] != "/dev/null" || !strings.HasPrefix(names[1], "pipe:[") {
		t.Errorf("streams %v, %v", names, err)
	}
	// The container can be dumped again.
	_, again := (&container{c.env, c.Launch, c.Started}).againDir(criu)
	d = c.prepareDump(again)
	f = c.freezeFor(time.Minute)
	if err := errors.Join(d.Run(c.ctx), f.Thaw(), d.Close()); err != nil {
		t.Error(err)
	}
	c.goesOn("after a second dump")
}

func (c *container) againDir(criu string) (string, *proto.Dump) {
	c.Helper()
	if err := os.RemoveAll(filepath.Join(c.dir, c.ID+"-dump")); err != nil {
		c.Fatal(err)
	}
	return c.dumpDir(criu)
}

// A dump that is given up must leave a container that runs.
func TestDumpIsAborted(t *testing.T) {
	criu := needCRIU(t)
	e := newEnv(t)
	c := e.runCounter("aborted")
	_, req := c.dumpDir(criu)
	d := c.prepareDump(req)
	f := c.freezeFor(time.Minute)
	ctx, cancel := context.WithCancel(c.ctx)
	cancel()
	if err := d.Run(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Run = %v", err)
	}
	if err := errors.Join(f.Thaw(), d.Close()); err != nil {
		t.Error(err)
	}
	c.noCRIU()
	c.goesOn("after an aborted dump")
}

func TestDumpWithoutRun(t *testing.T) {
	criu := needCRIU(t)
	e := newEnv(t)
	c := e.runCounter("unused")
	_, req := c.dumpDir(criu)
	if err := c.prepareDump(req).Close(); err != nil {
		t.Error(err)
	}
	c.noCRIU()
}

// A launcher that is killed leaves a CRIU that the daemon ends.
func TestDumpLosesLauncher(t *testing.T) {
	criu := needCRIU(t)
	e := newEnv(t)
	c := e.runCounter("lost")
	_, req := c.dumpDir(criu)
	d := c.prepareDump(req)
	orphans, err := cgroup.ProcsIn(d.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { // this process is process 1 of its namespace
		for _, pid := range orphans {
			_, _ = unix.Wait4(pid, nil, 0, nil)
		}
	}()
	f := c.freezeFor(time.Minute)
	if err := kill(d.p.proc); err != nil {
		t.Fatal(err)
	}
	if err := d.Run(c.ctx); errdefs.Code(err) != codes.Internal {
		t.Errorf("Run = %v", err)
	}
	if err := errors.Join(f.Thaw(), d.Close()); err != nil {
		t.Error(err)
	}
	c.noCRIU()
	c.goesOn("without the launcher")
}

// A CRIU that is killed during its dump.
func TestDumpLosesCRIU(t *testing.T) {
	criu := needCRIU(t)
	e := newEnv(t)
	c := e.runCounter("killed-criu")
	_, req := c.dumpDir(criu)
	d := c.prepareDump(req)
	f := c.freezeFor(time.Minute)
	if err := cgroup.KillChild(d.dir, patience); err != nil {
		t.Fatal(err)
	}
	if err := d.Run(c.ctx); err == nil {
		t.Error("a dump without CRIU succeeded")
	}
	if err := errors.Join(f.Thaw(), d.Close()); err != nil {
		t.Error(err)
	}
	c.noCRIU()
	c.goesOn("without CRIU")
}

func TestDumpRefusals(t *testing.T) {
	criu := needCRIU(t)
	e := newEnv(t)
	c := e.runCounter("refusals")
	old := filepath.Join(e.dir, "old-criu")
	if err := os.WriteFile(old, []byte("#!/bin/sh\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, req := c.dumpDir(old)
	if _, err := c.PrepareDump(c.ctx, req); err == nil {
		t.Error("a program that is no CRIU was accepted")
	}
	c.noCRIU()
	_, req = c.againDir(criu)
	req.ID = "nonexistent"
	if _, err := c.PrepareDump(c.ctx, req); errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("dump of no container: %v", err)
	}
	c.goesOn("after refusals")
}

// A full filesystem is reported as such, even if CRIU meets it.
func TestDumpOnFullFilesystem(t *testing.T) {
	criu := needCRIU(t)
	e := newEnv(t)
	c := e.runCounter("full")
	dir, req := c.dumpDir(criu)
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	req.Dir = f
	d := c.prepareDump(req)
	frozen := c.freezeFor(time.Minute)
	if err := d.Run(c.ctx); errdefs.Code(err) != codes.ResourceExhausted {
		t.Errorf("Run = %v", err)
	}
	if err := errors.Join(frozen.Thaw(), d.Close()); err != nil {
		t.Error(err)
	}
	c.goesOn("after a failed dump")
}
