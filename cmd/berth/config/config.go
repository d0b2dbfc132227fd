// Package config holds the daemon's configuration.
//
// # Contract
//
// Every option is declared once, as a field of [Config]: its tags carry the TOML
// key, the flag, the default, what values are allowed and the documentation. The
// flags of "berth serve", the output of "berth config default", docs/config.md
// and the parser of the configuration file are all derived from them.
//
// A value given by a flag wins over the file, the file wins over the default.
// A file with a key that is no option is refused, so that a misspelt key cannot
// silently leave a default in place.
package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"reflect"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/spf13/pflag"
)

// DefaultPath is read when --config is not given. It need not exist.
const DefaultPath = "/etc/berth/config.toml"

// Config is the daemon's configuration.
//
// Tags: toml is the key; flag the name of the flag, if the option has one;
// default the default in the form a flag would take it, lists separated by
// commas; path:"abs" asks for absolute paths and path:"optional" also allows
// none; oneof lists the only values allowed; min is the smallest number or
// duration, max the largest number; doc is the documentation.
//
// A field that is a map of structs stands for tables that users name: the key
// "handlers" for [handlers.NAME]. The fields of the struct have the same tags;
// example is a name that the documentation uses.
type Config struct {
	Listen string `toml:"listen" flag:"listen" default:"/run/berth/berth.sock" path:"socket" doc:"Unix socket on which CRI is served, as an absolute path or a unix:// URL. Not used when systemd hands over a socket."`
	Root   string `toml:"root" flag:"root" default:"/var/lib/berth" path:"abs" doc:"Directory of what outlives a reboot: images, writable layers, records of pods and containers. One daemon per directory."`
	State  string `toml:"state" flag:"state" default:"/run/berth" path:"abs" doc:"Directory of what ends with the boot: sockets, the running containers' directories. It becomes a private mount. One daemon per directory."`

	CadvisorSocket string `toml:"cadvisor_socket" default:"" path:"optional" doc:"Unix socket on which the calls of containerd's API are served that cAdvisor makes; cAdvisor is a part of kubelet and knows other runtimes' containers by their cgroups only. With /run/containerd/containerd.sock, where kubelet looks, its summary and /metrics/cadvisor have each pod's network, processes and containers, without feature gates. Only root may connect. Empty: none. berth does not start while another process listens there."`

	CgroupDriver string `toml:"cgroup_driver" flag:"cgroup-driver" default:"auto" oneof:"auto,cgroupfs,systemd" doc:"Who makes cgroups. auto: systemd where systemd is PID 1 and cgroups are version 2, else cgroupfs. kubelet asks for it and must not see it change while pods exist."`

	Network             string   `toml:"network" flag:"network" default:"cni" oneof:"cni,berth-net" doc:"What pods are connected by. cni: what cni_conf_dir describes; until there is something, only pods with the host's network run. berth-net: a network of berth's own, a bridge with addresses, host ports and masquerading, for which nothing needs to be installed and no file be written."`
	NetworkBridge       string   `toml:"network_bridge" default:"berth0" doc:"Name of the bridge of berth's own network."`
	NetworkSubnets      []string `toml:"network_subnets" default:"10.83.0.0/16,fdb6:83e7:2d10::/64" doc:"Networks from which pods have their addresses in berth's own network, one of IPv4, one of IPv6, or both. The first address of each is the bridge's. Once kubelet has passed on the node's pod CIDR, that is used for new pods. They are refused where the node has addresses in them, or routes into them. IPv6 is left out where the kernel does not have it or it is switched off."`
	NetworkMTU          int      `toml:"network_mtu" default:"0" min:"0" max:"65535" doc:"MTU of pods in berth's own network. 0: that of the interface with the node's default route when the bridge is made."`
	NetworkRoutes       []string `toml:"network_routes" doc:"Destinations that pods in berth's own network reach, in the form of 10.0.0.0/8. Empty: all."`
	NetworkMasquerade   bool     `toml:"network_masquerade" default:"true" doc:"Whether pods in berth's own network appear outside of it with the node's address."`
	NetworkNoMasquerade []string `toml:"network_no_masquerade" doc:"Networks that see the pods' own addresses all the same, such as those of other nodes' pods."`
	NetworkCheckSource  bool     `toml:"network_check_source" default:"true" doc:"Whether pods in berth's own network can send with their own addresses only, of IP and of hardware, also to neighbours. It needs the kernel's classifier bpf (CONFIG_NET_CLS_BPF)."`
	NetworkIsolation    []string `toml:"network_isolation" oneof:"pods,ingress,node" doc:"What is kept apart in berth's own network. pods: pods do not reach each other, nor each other's host ports. ingress: who is not on this node reaches pods by their host ports only. node: pods do not reach the node itself."`

	CNIConfDir  string   `toml:"cni_conf_dir" flag:"cni-conf-dir" default:"/etc/cni/net.d" path:"abs" doc:"Directory of CNI network configurations. The first valid one in lexical order is used; changes are noticed while running."`
	CNIBinDirs  []string `toml:"cni_bin_dirs" flag:"cni-bin-dir" default:"/opt/cni/bin,/usr/lib/cni" path:"abs" doc:"Directories in which CNI plugins are looked for, in this order. Distributions that package the plugins use the second one."`
	CNICacheDir string   `toml:"cni_cache_dir" path:"optional" doc:"Directory in which the CNI library keeps the results of plugins. Empty: cni below root."`
	CNITimeout  Duration `toml:"cni_timeout" default:"110s" min:"100ms" doc:"The plugins of a network that have not attached or detached a pod within this time are killed, with all that they started. It is less than the two minutes that kubelet waits for a pod to be stopped, so that the pod's events tell which plugin hangs."`
	NetNSDir    string   `toml:"netns_dir" default:"/run/netns" path:"abs" doc:"Directory in which network namespaces of pods are pinned as berth-<pod ID>. The ip tool lists those in /run/netns."`

	RegistryDirs         []string `toml:"registry_dirs" flag:"registry-dir" default:"/etc/berth/certs.d,/etc/containerd/certs.d" path:"abs" doc:"Directories with one folder per registry host that holds a hosts.toml (mirrors, CA, client certificates, headers) in containerd's format. The first directory that knows the host is used. Its client certificates and skip_verify are for the host itself; token servers and hosts that it redirects to are verified, by its CA certificates too. These may be other machines, but neither this one's loopback and link-local addresses (unless the registry is there itself) nor a cloud's metadata service; redirect_to, a list of addresses and networks in a host's table, allows what is listed."`
	DockerConfig         string   `toml:"docker_config" path:"optional" doc:"File in the format of docker's config.json with credentials for pulls that bring none. Empty: such pulls are anonymous."`
	PauseImage           string   `toml:"pause_image" doc:"Image run as the pause container of every pod, pulled like any other. Empty: the pause program that is built into berth."`
	PinnedImages         []string `toml:"pinned_images" doc:"Names of images reported to kubelet as pinned, which keeps its image garbage collection away from them. The pause image is always one of them."`
	MaxParallelDownloads int      `toml:"max_parallel_downloads" default:"8" min:"1" doc:"How many layers of one image are transferred at the same time."`
	MaxRangeRequests     int      `toml:"max_range_requests" default:"16" min:"0" doc:"How many parts of large layers are fetched at a time, of all pulls: of a layer that comes so slowly that unpacking it waits, parts are fetched by range requests beside its own transfer, each of which takes 4 MiB of memory: fewer at a time where berth's cgroup has a memory limit, an eighth of which they may take. A registry has no more of them than it leaves for others, which is half. One that knows no ranges gets no more of them for that layer; a layer that comes with less than 256 KiB/s, or no faster with parts, has none. 0: each layer is one transfer."`
	StallTimeout         Duration `toml:"stall_timeout" default:"1m" min:"1s" doc:"A transfer from a registry that delivers no byte for so long, or less than 8192 bytes a second over so long a time, is given up. So is a layer with whose unpacking there is no progress."`

	MaxLogLine    int    `toml:"max_log_line" default:"16384" min:"256" max:"1048576" doc:"Bytes of one line in a container's log. Longer lines are split and tagged as partial. A container's monitor keeps so much of an unfinished line in memory."`
	IdleLaunchers int    `toml:"idle_launchers" default:"2" min:"0" doc:"How many processes wait ready to launch a container. Each saves about 20 ms of a container's start and costs a few MB of memory."`
	ShimPath      string `toml:"shim_path" path:"optional" doc:"The berth-shim program. Empty: beside the berth program, or else in PATH."`

	MaxLayerBytes   int `toml:"max_layer_bytes" default:"274877906944" min:"1" doc:"How long the tar of an image's layer may be, and the files in it with their holes. Less is allowed of a small blob: 1100 times its size and 64 MiB."`
	MaxLayerEntries int `toml:"max_layer_entries" default:"4194304" min:"1" doc:"How many entries the tar of an image's layer may have."`

	DiskReservePercent int `toml:"disk_reserve_percent" default:"5" min:"0" max:"90" doc:"How much of the filesystem of images, of its bytes and of its inodes, layers leave free for everything else. A pull that comes to it fails with ResourceExhausted, and what it has unpacked is deleted. 0: nothing is kept free."`
	DiskReserveBytes   int `toml:"disk_reserve_bytes" default:"4294967296" min:"0" doc:"The most bytes that disk_reserve_percent makes layers leave free. Of inodes that is 65536."`

	WritableLayerLimit    int `toml:"writable_layer_limit" default:"0" min:"0" doc:"How many bytes a container may write into its own filesystem: a hard limit, at which writes fail. It needs root on XFS, or on ext4 with the features project and quota, mounted with prjquota; else berth does not start. It holds for containers that start from now on. A process can take a file of its own out of the limit by an ioctl (FS_IOC_FSSETXATTR), except in pods with a user namespace; kubelet sees such files all the same. By the same ioctl a process that knows the project ID of another container can use up its limit. 0: no limit."`
	WritableLayerProjects int `toml:"writable_layer_projects" default:"1073741824" min:"1" max:"3221225471" doc:"The first of the 1073741824 project IDs that writable layers have where root is mounted with prjquota; berth draws them at random. No other program may use them on that filesystem, another berth neither; kubelet uses those from 1048577 on. See /etc/projid."`

	LayerDriver string `toml:"layer_driver" flag:"layer-driver" default:"auto" oneof:"auto,erofs,directory" doc:"The form in which layers of images are kept. directory: files of the file system that root is on. erofs: one file with the content of all its files, and one small EROFS image for each image: less to write and to delete, and one lower layer for a container. It takes Linux 6.15, and root on a file system whose files can be mounted, not a tmpfs. auto: erofs where that works, else directory. Images that were pulled under another setting stay in use."`

	UnpackPath string `toml:"unpack_path" path:"optional" doc:"The berth-unpack program, which makes files of the layers of images. Empty: beside the berth program, or else in PATH."`

	StatsPeriod Duration `toml:"stats_period" default:"10s" min:"100ms" doc:"How often it is counted what a container has written into its own filesystem and how many files it has open. What takes long to count is counted less often, and a thirtieth as often what nobody asks for. Everything else in statistics is measured when somebody asks."`

	CDISpecDirs            []string `toml:"cdi_spec_dirs" default:"/etc/cdi,/var/run/cdi" path:"abs" doc:"Directories with descriptions of CDI devices. If two describe the same device the last directory wins. They are read for each container that asks for a device. What they say is trusted: hooks run as root."`
	DeviceOwnership        bool     `toml:"device_ownership_from_security_context" default:"false" doc:"Whether the devices of a container belong, in it, to the runAsUser and runAsGroup of its security context, so that it need not be root to use them. In pods with a user namespace it has no effect: devices are bound there, with the owner they have on the host."`
	NRI                    bool     `toml:"nri" default:"true" doc:"Let plugins of the Node Resource Interface see pods and containers and change them. Without plugins it costs nothing."`
	NRISocket              string   `toml:"nri_socket" default:"/var/run/nri/nri.sock" path:"optional" doc:"Unix socket at which plugins connect that berth has not started. Empty: none may. It must not be another runtime's."`
	NRIPluginDir           string   `toml:"nri_plugin_dir" default:"/opt/nri/plugins" path:"abs" doc:"Directory of plugins that are started with the daemon: every program in it whose name is NN-name. It need not exist."`
	NRIPluginConfigDir     string   `toml:"nri_plugin_config_dir" default:"/etc/nri/conf.d" path:"abs" doc:"Directory of these plugins' configuration: NN-name.conf or name.conf is handed to the plugin."`
	NRIRegistrationTimeout Duration `toml:"nri_registration_timeout" default:"5s" min:"10ms" doc:"A plugin that has not registered so long after it was started, or has connected, is dropped."`
	NRIRequestTimeout      Duration `toml:"nri_request_timeout" default:"5s" min:"10ms" doc:"A plugin that does not answer within this time is dropped, and pods go on without it, unless it registered with another failure policy."`
	NRIReject              []string `toml:"nri_reject" oneof:"hooks,namespaces,sysctl,seccomp-default,seccomp-custom,seccomp-unconfined" doc:"Adjustments that no plugin may make; a container for which one does is not created. The kinds of seccomp are those that the container asks for."`
	NRIRequiredPlugins     []string `toml:"nri_required_plugins" doc:"Names of plugins without which no container is created. This holds for static pods too."`

	DefaultHandler string `toml:"default_handler" default:"berth" doc:"Runtime handler of pods that name none: berth, which is built in, or one of handlers."`

	StreamAddress     string   `toml:"stream_address" flag:"stream-address" default:"127.0.0.1:0" doc:"IP address and port on which exec, attach and port-forward sessions are served; kubelet on this node connects to it. Port 0: any. Other addresses than loopback need stream_tls_cert."`
	StreamTLSCert     string   `toml:"stream_tls_cert" path:"optional" doc:"File with the certificate, in PEM, that sessions are served with. Empty: plain HTTP."`
	StreamTLSKey      string   `toml:"stream_tls_key" path:"optional" doc:"File with the private key of stream_tls_cert, in PEM."`
	StreamClientCA    string   `toml:"stream_client_ca" path:"optional" doc:"File with the CA certificates, in PEM, one of which must have signed a client's certificate. Empty: clients show none; they have a URL that is good for one session."`
	StreamIdleTimeout Duration `toml:"stream_idle_timeout" default:"4h" min:"1s" doc:"A session in which nothing is sent for so long is ended."`

	MaxExecs          int `toml:"max_execs" default:"512" min:"1" doc:"How many commands may be run in containers at the same time, probes and exec sessions alike; a quarter of them is left to probes and hooks. Each has a process of some MB in berth's cgroup, which the OOM killer may take. One more is refused with ResourceExhausted."`
	MaxContainerExecs int `toml:"max_container_execs" default:"128" min:"1" doc:"How many commands may be run in one container at the same time."`
	MaxSessions       int `toml:"max_sessions" default:"4096" min:"1" doc:"How many clients may be attached to containers, and connections be forwarded to ports of pods, at the same time. A pod may have half of them."`

	WaitLimit Duration `toml:"wait_limit" default:"1m" min:"1s" doc:"Whatever berth waits for longer than this (a plugin, a disk, the end of a killed process, its turn) is logged, with the stacks of all goroutines once a minute at most. What bounds the wait itself is not changed. Waits that may take longer have limits of their own; verbose Status shows all of them."`

	TracingEndpoint     string `toml:"tracing_endpoint" doc:"Host and port of an OpenTelemetry collector, to which the spans of requests are sent that kubelet traces, or that are sampled. Empty: none. What berth trace shows is recorded in any case."`
	TracingProtocol     string `toml:"tracing_protocol" default:"grpc" oneof:"grpc,http/protobuf" doc:"OTLP's form: grpc, for which collectors mostly use port 4317, or http/protobuf (port 4318, path /v1/traces)."`
	TracingInsecure     bool   `toml:"tracing_insecure" default:"false" doc:"Whether the collector is spoken to without TLS, as kubelet does, which is fit for one on this node. Else its certificate is verified."`
	TracingSamplingRate int    `toml:"tracing_sampling_rate_per_million" default:"0" min:"0" max:"1000000" doc:"How many of a million requests are traced of those that come without a trace of kubelet's, which decides for its own."`

	LogLevel  string `toml:"log_level" flag:"log-level" default:"info" oneof:"debug,info,warn,error" doc:"The least severe messages that are logged."`
	LogFormat string `toml:"log_format" flag:"log-format" default:"text" oneof:"text,json" doc:"Form of the log on standard error."`

	Handlers map[string]Handler `toml:"handlers" example:"crun" doc:"A runtime handler: what a RuntimeClass names as its handler. Without a path it is another name of the built-in one, which is called berth as well. A program that is missing does not keep the daemon from starting: pods that ask for its handler are refused until it is there."`
}

// Handler is one of the tables [handlers.NAME].
type Handler struct {
	Path string   `toml:"path" path:"optional" example:"\"/usr/bin/crun\"" doc:"An OCI runtime with runc's command line, such as crun, or gVisor's runsc. What it can do is asked with its features command. Empty: the built-in runtime."`
	Args []string `toml:"args" example:"[\"--debug\"]" doc:"Options to give it before every command. --root, --log, --log-format and --systemd-cgroup are given by berth."`
}

// BuiltinHandler is the name of the runtime handler that is always there.
const BuiltinHandler = "berth"

// Default returns the configuration of a daemon without flags and file.
func Default() *Config {
	c := new(Config)
	for _, o := range options() {
		if err := o.set(fields(c), o.defaults()); err != nil {
			panic(fmt.Sprintf("config: default of %s: %v", o.Key, err)) // a mistake in the tags above, found by any test
		}
	}
	return c
}

// Parse reads a configuration file's content; name is used in errors. Options
// the file does not mention have their defaults. Every unknown key is reported
// with its line and the option whose name is nearest.
func Parse(name string, content []byte) (*Config, error) {
	c := Default()
	lines, err := decode(name, content, c)
	if err != nil {
		return nil, err
	}
	if err := c.validate(lines.where); err != nil {
		return nil, err
	}
	return c, nil
}

// fields are the values that options of the top level are about.
func fields(c *Config) reflect.Value { return reflect.ValueOf(c).Elem() }

// AddFlags registers --config and the flags of all options that have one.
func AddFlags(flags *pflag.FlagSet) {
	flags.String("config", DefaultPath, "configuration file in TOML; see \"berth config default\"")
	for _, o := range options() {
		if o.Flag != "" {
			flags.Var(&flagValue{option: o}, o.Flag, o.usage())
		}
	}
}

// Load returns the configuration that follows from the flags registered by
// AddFlags and from the file they name. The file may be missing unless --config
// was given.
func Load(flags *pflag.FlagSet) (*Config, error) {
	c := Default()
	name, err := flags.GetString("config")
	if err != nil {
		return nil, err
	}
	content, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) && !flags.Changed("config") {
		content, err = nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	lines, err := decode(name, content, c)
	if err != nil {
		return nil, err
	}
	fromFlag, err := applyFlags(flags, c)
	if err != nil {
		return nil, err
	}
	err = c.validate(func(key string) string {
		if flag, ok := fromFlag[key]; ok {
			return "--" + flag
		}
		return lines.where(key)
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// LoadTold returns the configuration of a daemon that runs, as it tells it in verbose Status: its
// own flags are in it. Flags that were given here win over that. An option that an older daemon
// does not tell has its default.
func LoadTold(flags *pflag.FlagSet, told []byte) (*Config, error) {
	c := Default()
	if err := json.Unmarshal(told, c); err != nil {
		return nil, fmt.Errorf("read the configuration of the daemon: %w", err)
	}
	fromFlag, err := applyFlags(flags, c)
	if err != nil {
		return nil, err
	}
	err = c.validate(func(key string) string {
		if flag, ok := fromFlag[key]; ok {
			return "--" + flag
		}
		return "the daemon's " + key
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// applyFlags sets the options whose flags were given and returns these, by key.
func applyFlags(flags *pflag.FlagSet, c *Config) (map[string]string, error) {
	given := make(map[string]string)
	for _, o := range options() {
		f := flags.Lookup(o.Flag)
		if o.Flag == "" || f == nil || !f.Changed {
			continue
		}
		if err := o.set(fields(c), f.Value.(*flagValue).texts); err != nil {
			return nil, fmt.Errorf("--%s: %w", o.Flag, err)
		}
		given[o.Key] = o.Flag
	}
	return given, nil
}

// places tells where in a file options are set.
type places struct {
	name  string         // of the file
	lines map[string]int // of the keys that are in it
}

// where names an option's place: "config.toml: line 3: root".
func (p places) where(key string) string {
	if line, ok := p.lines[key]; ok {
		return fmt.Sprintf("%s: line %d: %s", p.name, line, key)
	}
	return p.name + ": " + key
}

// decode parses content into c and explains what is wrong with it by file, line
// and key.
func decode(name string, content []byte, c *Config) (places, error) {
	found := places{name: name, lines: map[string]int{}}
	if err := found.read(content); err != nil {
		return found, err
	}
	err := toml.Unmarshal(content, c)
	var wrong *toml.DecodeError
	switch {
	case err == nil:
		return found, nil
	case errors.As(err, &wrong):
		line, column := wrong.Position()
		if key := strings.Join(wrong.Key(), "."); key != "" {
			return found, fmt.Errorf("%s: line %d: %s: %w", name, line, key, wrong)
		}
		return found, fmt.Errorf("%s: line %d, column %d: %w", name, line, column, wrong)
	default:
		return found, fmt.Errorf("%s: %w", name, err)
	}
}
