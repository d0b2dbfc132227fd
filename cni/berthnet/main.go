package berthnet

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/cni/pkg/version"

	"berth/cni/berthnet/conf"
)

// Type is the plugin's type.
const Type = conf.Type

// Main runs the plugin as a program. It exits the process if the plugin fails.
func Main() {
	ctx := context.Background() // the runtime kills the process at its own deadline
	p := &Plugin{}
	skel.PluginMainFuncs(skel.CNIFuncs{
		Add: func(args *skel.CmdArgs) error {
			out, err := p.addAndPrint(ctx, args)
			if err != nil {
				return asCNI(err)
			}
			fmt.Print(string(out))
			return nil
		},
		Del:    program(func(args *skel.CmdArgs) error { return p.del(ctx, args, false) }),
		Check:  program(p.check),
		GC:     program(func(args *skel.CmdArgs) error { return p.gc(ctx, args) }),
		Status: program(func(args *skel.CmdArgs) error { return p.status(ctx, args) }),
	}, Versions, "CNI plugin berth-net: bridge, addresses, masquerading, host ports and bandwidth limits in one")
}

// program converts a function's errors to the specification's.
func program(run func(*skel.CmdArgs) error) func(*skel.CmdArgs) error {
	return func(args *skel.CmdArgs) error {
		if err := run(args); err != nil {
			return asCNI(err)
		}
		return nil
	}
}

// addAndPrint returns the result of ADD in the configuration's version.
func (p *Plugin) addAndPrint(ctx context.Context, args *skel.CmdArgs) ([]byte, error) {
	var stated types.PluginConf
	if err := json.Unmarshal(args.StdinData, &stated); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "configuration of berth-net cannot be decoded", err.Error())
	}
	made, err := p.add(ctx, args)
	if err != nil {
		return nil, err
	}
	result, err := made.GetAsVersion(stated.CNIVersion)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = result.PrintTo(&out)
	return out.Bytes(), err
}

// Exec runs the plugin as a function. stdin, environ and the returned stdout have the contents of
// CNI specification section 3. Each error is a *types.Error. After a DEL the caller must remove the
// pod's namespace at once. ctx bounds the waits for locks, but not the kernel's work.
func (p *Plugin) Exec(ctx context.Context, stdin []byte, environ []string) ([]byte, error) {
	verb, args := parseEnviron(environ)
	args.StdinData = stdin
	out, err := p.dispatch(ctx, verb, args)
	if err != nil {
		return nil, asCNI(err)
	}
	return out, nil
}

func (p *Plugin) dispatch(ctx context.Context, verb string, args *skel.CmdArgs) ([]byte, error) {
	if verb == "VERSION" {
		return json.Marshal(Versions)
	}
	if err := checkArgs(verb, args); err != nil {
		return nil, err
	}
	switch verb {
	case "ADD":
		return p.addAndPrint(ctx, args)
	case "DEL":
		return nil, p.del(ctx, args, true)
	case "CHECK":
		return nil, p.check(args)
	case "GC":
		return nil, p.gc(ctx, args)
	case "STATUS":
		return nil, p.status(ctx, args)
	}
	return nil, types.NewError(types.ErrInvalidEnvironmentVariables, "unknown CNI_COMMAND: "+verb, "")
}

// parseEnviron decodes the variables that package skel decodes for the program.
func parseEnviron(environ []string) (verb string, args *skel.CmdArgs) {
	args = &skel.CmdArgs{}
	into := map[string]*string{"CNI_COMMAND": &verb, "CNI_CONTAINERID": &args.ContainerID, "CNI_NETNS": &args.Netns,
		"CNI_IFNAME": &args.IfName, "CNI_ARGS": &args.Args, "CNI_PATH": &args.Path}
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		if to := into[name]; to != nil {
			*to = value // the last duplicate counts, as in a process
		}
	}
	return verb, args
}

// checkArgs does the checks that package skel does for the program.
func checkArgs(verb string, args *skel.CmdArgs) error {
	stated, err := (&version.ConfigDecoder{}).Decode(args.StdinData)
	if err != nil {
		return types.NewError(types.ErrDecodingFailure, "configuration of berth-net cannot be decoded", err.Error())
	}
	if err := (&version.Reconciler{}).Check(stated, Versions); err != nil {
		return types.NewError(types.ErrIncompatibleCNIVersion, "incompatible CNI versions", err.Details())
	}
	if verb == "GC" || verb == "STATUS" {
		return nil
	}
	if err := utils.ValidateContainerID(args.ContainerID); err != nil {
		return err
	}
	if err := utils.ValidateInterfaceName(args.IfName); err != nil {
		return err
	}
	if args.Netns == "" && verb != "DEL" {
		return types.NewError(types.ErrInvalidEnvironmentVariables, "required env variables [CNI_NETNS] missing", "")
	}
	return nil
}
