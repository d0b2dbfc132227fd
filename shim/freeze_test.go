package shim

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// frozenState returns what the kernel says about the container's freezer.
func (c *container) frozenState() (frozen bool) {
	c.Helper()
	dir := c.group().FreezerDir()
	if data, err := os.ReadFile(filepath.Join(dir, "freezer.state")); err == nil {
		return strings.TrimSpace(string(data)) == "FROZEN"
	}
	data, err := os.ReadFile(filepath.Join(dir, "cgroup.events"))
	if err != nil {
		c.Fatal(err)
	}
	return strings.Contains(string(data), "frozen 1")
}

// count returns the last number that the container has written.
func (c *container) count() int {
	lines := strings.Fields(c.output("stdout"))
	if len(lines) == 0 {
		return 0
	}
	n, _ := strconv.Atoi(lines[len(lines)-1])
	return n
}

const counting = "i=0; while true; do i=$((i+1)); echo $i; sleep 0.01; done"

// runCounter starts a container that counts.
func (e *env) runCounter(id string) *container {
	e.Helper()
	c := e.run(id, counting)
	e.until("the container counts", func() bool { return c.count() > 0 })
	return c
}

func (c *container) freezeFor(limit time.Duration) *Frozen {
	c.Helper()
	f, err := OpenMonitor(c.Dir).Freeze(c.ctx, c.group().FreezerDir(), limit)
	if err != nil {
		c.Fatal(err)
	}
	if !c.frozenState() {
		c.Error("the container is not frozen after Freeze")
	}
	return f
}

func (c *container) goesOn(why string) {
	c.Helper()
	before := c.count()
	c.until("the container runs "+why, func() bool { return c.count() > before+1 })
}

func TestMonitorFreezesAndThaws(t *testing.T) {
	e := newEnv(t)
	c := e.runCounter("frozen")
	f := c.freezeFor(time.Minute)
	if _, err := OpenMonitor(c.Dir).Freeze(c.ctx, c.group().FreezerDir(), time.Minute); err == nil {
		t.Error("a second client froze the container, too")
	}
	if !c.frozenState() {
		t.Error("the refused client thawed the container")
	}
	if err := f.Thaw(); err != nil {
		t.Error(err)
	}
	if c.frozenState() {
		t.Error("the container is frozen after Thaw")
	}
	c.goesOn("after a thaw")
}

// The daemon may be killed at any time.
func TestMonitorThawsWithoutClient(t *testing.T) {
	e := newEnv(t)
	c := e.runCounter("left")
	f := c.freezeFor(time.Minute)
	if err := f.c.UnixConn.Close(); err != nil {
		t.Fatal(err)
	}
	f.reader.Wait()
	c.goesOn("after the end of the connection")
}

func TestMonitorThawsAfterLimit(t *testing.T) {
	e := newEnv(t)
	c := e.runCounter("limited")
	f := c.freezeFor(50 * time.Millisecond)
	c.goesOn("after the limit")
	if err := f.Thaw(); err == nil {
		t.Error("Thaw reports no error for a container that was thawed before")
	}
}

// A CRIU that ends late freezes the cgroup again.
func TestMonitorRepeatsThaw(t *testing.T) {
	e := newEnv(t)
	c := e.runCounter("refrozen")
	if err := c.freezeFor(time.Minute).Thaw(); err != nil {
		t.Fatal(err)
	}
	c.freeze()
	c.goesOn("after a late freeze")
}

func TestMonitorRefusesOtherDirectories(t *testing.T) {
	e := newEnv(t)
	c := e.runCounter("refused")
	for _, dir := range []string{"", "relative", "/", "/nonexistent", "/" + strings.Repeat("x", 5000)} {
		if _, err := OpenMonitor(c.Dir).Freeze(c.ctx, dir, time.Minute); err == nil {
			t.Errorf("%.20q was frozen", dir)
		}
	}
	c.freezeFor(time.Minute).Thaw()
}

func TestFrozenContainerCanBeKilled(t *testing.T) {
	e := newEnv(t)
	c := e.runCounter("killed")
	f := c.freezeFor(time.Minute)
	if err := c.group().Signal(); err != nil {
		t.Fatal(err)
	}
	if exit := c.wait(); exit.Signal != int(unix.SIGKILL) {
		t.Errorf("exit %+v", exit)
	}
	select {
	case <-f.Lost():
	case <-c.ctx.Done():
		t.Error("the end of the container is not noticed")
	}
	if err := f.Thaw(); err == nil {
		t.Error("Thaw of a container that has ended reports no error")
	}
}

func TestFreezeOfEndedContainer(t *testing.T) {
	e := newEnv(t)
	c := e.run("ended", "true")
	dir := c.group().FreezerDir()
	c.wait()
	if _, err := OpenMonitor(c.Dir).Freeze(context.Background(), dir, time.Minute); err == nil {
		t.Error("a container that has ended was frozen")
	}
}
