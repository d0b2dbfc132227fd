package oci

import (
	"encoding/json"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
)

func TestDevices(t *testing.T) {
	t.Parallel()
	const deny = `{"allow":false,"access":"rwm"}`
	const fuseNode = `{"path":"/dev/fuse","type":"c","major":10,"minor":229,"fileMode":438,"uid":0,"gid":0}`
	for _, test := range []struct {
		name         string
		devices      []*runtimeapi.Device
		nodes, rules string
	}{
		{"none", nil, `null`, `[` + deny + `]`},
		{"one", []*runtimeapi.Device{{HostPath: "/dev/fuse", ContainerPath: "/dev/fuse", Permissions: "rw"}},
			`[` + fuseNode + `]`, `[` + deny + `,{"allow":true,"type":"c","major":10,"minor":229,"access":"rw"}]`},
		{"default path and permissions", []*runtimeapi.Device{{HostPath: "/dev/fuse"}},
			`[` + fuseNode + `]`, `[` + deny + `,{"allow":true,"type":"c","major":10,"minor":229,"access":"rwm"}]`},
		{"by link, renamed", []*runtimeapi.Device{{HostPath: "/dev/disk/by-id/x", ContainerPath: "/dev/../dev/disk", Permissions: "r"}},
			`[{"path":"/dev/disk","type":"b","major":8,"minor":0,"fileMode":432,"uid":0,"gid":6}]`,
			`[` + deny + `,{"allow":true,"type":"b","major":8,"minor":0,"access":"r"}]`},
		{"directory", []*runtimeapi.Device{{HostPath: "/dev/snd", ContainerPath: "/dev/sound", Permissions: "rw"}},
			`[{"path":"/dev/sound/by-path/seq","type":"c","major":116,"minor":1,"fileMode":432,"uid":0,"gid":29},` +
				`{"path":"/dev/sound/pcm","type":"c","major":116,"minor":2,"fileMode":432,"uid":0,"gid":29}]`,
			`[` + deny + `,{"allow":true,"type":"c","major":116,"minor":1,"access":"rw"},{"allow":true,"type":"c","major":116,"minor":2,"access":"rw"}]`},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := testInput()
			in.Config.Devices = test.devices
			spec := mustSpec(t, in)
			nodes, err := json.Marshal(spec.Linux.Devices)
			testutil.Must(t, err)
			rules, err := json.Marshal(spec.Linux.Resources.Devices)
			testutil.Must(t, err)
			if string(nodes) != test.nodes || string(rules) != test.rules {
				t.Errorf("got  %s\n     %s\nwant %s\n     %s", nodes, rules, test.nodes, test.rules)
			}
		})
	}
}

func TestDeviceOwnership(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name        string
		enabled     bool
		user, group *runtimeapi.Int64Value
		uid, gid    uint32
	}{
		{"disabled", false, &runtimeapi.Int64Value{Value: 1000}, &runtimeapi.Int64Value{Value: 2000}, 0, 6},
		{"both", true, &runtimeapi.Int64Value{Value: 1000}, &runtimeapi.Int64Value{Value: 2000}, 1000, 2000},
		{"user", true, &runtimeapi.Int64Value{Value: 1000}, nil, 1000, 6},
		{"neither", true, nil, nil, 0, 6},
		{"root", true, &runtimeapi.Int64Value{}, &runtimeapi.Int64Value{}, 0, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := testInput()
			in.DeviceOwnership = test.enabled
			in.sc().RunAsUser, in.sc().RunAsGroup = test.user, test.group
			in.Config.Devices = []*runtimeapi.Device{{HostPath: "/dev/sda"}}
			d := mustSpec(t, in).Linux.Devices[0]
			if *d.UID != test.uid || *d.GID != test.gid {
				t.Errorf("owner %d:%d, want %d:%d", *d.UID, *d.GID, test.uid, test.gid)
			}
		})
	}
	in := testInput()
	in.DeviceOwnership = true
	in.privilege()
	in.sc().RunAsUser = &runtimeapi.Int64Value{Value: 1000}
	for _, d := range mustSpec(t, in).Linux.Devices { // no request names these one by one
		if *d.UID != 0 {
			t.Errorf("%s of a privileged container belongs to %d", d.Path, *d.UID)
		}
	}
}

func TestDevicesPrivileged(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.privilege()
	in.Config.Devices = []*runtimeapi.Device{{HostPath: "/dev/sda", ContainerPath: "/dev/fuse"}}
	spec := mustSpec(t, in)
	if len(spec.Linux.Devices) != 3 || spec.Linux.Devices[0].Major != 8 {
		t.Errorf("nodes: %+v", spec.Linux.Devices)
	}
	if r := spec.Linux.Resources.Devices[0]; !r.Allow || r.Access != "rwm" || r.Type != "" {
		t.Errorf("first rule: %+v", r)
	}
}

func TestDevicesRefused(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		device *runtimeapi.Device
		err    string
	}{
		{&runtimeapi.Device{HostPath: "/dev/missing"}, "/dev/missing does not exist"},
		{&runtimeapi.Device{HostPath: "/srv/data"}, "not a device"},
		{&runtimeapi.Device{HostPath: "/dev/empty"}, "without devices"},
		{&runtimeapi.Device{HostPath: "fuse"}, `"fuse"`},
		{&runtimeapi.Device{}, `""`},
		{&runtimeapi.Device{HostPath: "/dev/fuse", ContainerPath: "fuse"}, `"fuse"`},
		{&runtimeapi.Device{HostPath: "/dev/fuse", ContainerPath: "/dev/.."}, "root"},
		{&runtimeapi.Device{HostPath: "/dev/fuse", Permissions: "rx"}, `"rx"`},
		{&runtimeapi.Device{HostPath: "/dev/fuse", Permissions: "rrrr"}, `"rrrr"`},
	} {
		refused(t, func(in *ContainerInput) { in.Config.Devices = []*runtimeapi.Device{test.device} }, codes.InvalidArgument, test.err)
	}
}
