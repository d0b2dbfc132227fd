// Package config holds the daemon's configuration.
//
// # Contract
//
// Every option is declared once, as a field of [Config]. Its tags have the key, the flag, the
// default, the allowed values and the documentation. The flags of berthd, the output of "berth
// config default", docs/config.md and the parser derive from them.
//
// The configuration is a TOML file and the files of a directory beside it. Flags override the
// files, and later files override earlier ones. Both override the defaults. Load refuses a file
// with an unknown key, so that a misspelled key cannot leave a default in place. It accepts the
// keys of release 0.2, which had no tables, with a warning that has the
// new key.
package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"

	"github.com/spf13/pflag"
)

// RunDir is the directory below root in which "berth run" keeps the files of its pods, each below
// the pod's UID.
const RunDir = "run"

// DefaultPath is the configuration file without --config. It need not exist.
const DefaultPath = "/etc/berth/config.toml"

// Config is the daemon's configuration.
//
// The tag key has the option's table and key. The tag old has the option's key in release 0.2. The
// tag flag has the name of the flag, if the option has a flag. The tag default has the form of a
// flag's value, with lists separated by commas. path:"abs" requires absolute paths, and
// path:"optional" also allows an empty value. The tag oneof lists the allowed values. min and max
// are limits. doc is the documentation. reload:"true" marks an option that SIGHUP applies to a
// running daemon.
//
// A field that is a map of structs stands for tables that users name. For example, the key
// "handlers" stands for [handlers.NAME]. The fields of the struct have the same tags. The tag
// example is a table name for the documentation.
type Config struct {
	Listen         string   `key:"listen" flag:"listen" default:"/run/berth/berth.sock" path:"socket" doc:"Unix socket that serves the CRI: an absolute path or a unix:// URL. A socket passed by systemd takes precedence."`
	Root           string   `key:"root" flag:"root" default:"/var/lib/berth" path:"abs" doc:"Persistent data: images, writable layers, records of pods and containers. Only one daemon can use it."`
	State          string   `key:"state" flag:"state" default:"/run/berth" path:"abs" doc:"Data until the next boot: sockets and the directories of running containers. It becomes a private mount. Only one daemon can use it."`
	CadvisorSocket string   `key:"cadvisor_socket" default:"" path:"optional" doc:"Unix socket that answers the calls of containerd's API that cAdvisor, a part of kubelet, makes. With /run/containerd/containerd.sock kubelet shows each pod's network, processes and containers without feature gates. Empty: no such socket. See docs/kubelet.md."`
	CgroupDriver   string   `key:"cgroup_driver" flag:"cgroup-driver" default:"auto" oneof:"auto,cgroupfs,systemd" doc:"Driver that creates cgroups. auto: systemd if systemd is PID 1 and cgroups are version 2, else cgroupfs. kubelet asks for the driver. Never change it while pods exist."`
	DefaultHandler string   `key:"default_handler" default:"berth" reload:"true" doc:"Runtime handler of pods that name none: berth, the built-in one, or a name from handlers."`
	WaitLimit      Duration `key:"wait_limit" default:"1m" min:"1s" doc:"A wait that is longer than this is logged, for example a wait for a plugin, a disk or a killed process. The limit of the wait itself stays unchanged. See docs/reliability.md."`

	LogLevel  string `key:"log.level" old:"log_level" flag:"log-level" default:"info" oneof:"debug,info,warn,error" reload:"true" doc:"Lowest severity of logged messages."`
	LogFormat string `key:"log.format" old:"log_format" flag:"log-format" default:"text" oneof:"text,json" doc:"Format of the log on standard error."`

	MaxLogLine    int      `key:"container.max_log_line" old:"max_log_line" default:"16384" min:"256" max:"1048576" doc:"Maximum length in bytes of a line in a container's log. Longer lines are split and tagged as partial. The container's monitor keeps up to this much of an unfinished line in memory."`
	IdleLaunchers int      `key:"container.idle_launchers" old:"idle_launchers" default:"2" min:"0" doc:"Number of processes that wait ready to start a container. Each saves about 20 ms of a start and uses a few MB of memory."`
	ShimPath      string   `key:"container.shim_path" old:"shim_path" path:"optional" doc:"Path of the program berth-shim. Empty: beside the program berthd, else in PATH."`
	TaskPath      string   `key:"container.task_path" path:"optional" doc:"Path of the program berth-task, which calls the shims of handlers. Empty: beside the program berthd, else in PATH."`
	StatsPeriod   Duration `key:"container.stats_period" old:"stats_period" default:"10s" min:"100ms" doc:"Interval for counting a container's writable layer and open files. Slow counts run less often. If no client asks for the figures of a container, its interval is 30 times as long. All other statistics are read on request."`

	DefaultEnv     []string `key:"container.default_env" doc:"Environment variables of all containers, in the form NAME=VALUE. Variables of images and pods replace them."`
	DefaultUlimits []string `key:"container.default_ulimits" doc:"Resource limits of all containers, in the form NAME=SOFT:HARD, such as nofile=1024:65536. -1 is unlimited. Limits that are not listed are the daemon's own."`
	DefaultSeccomp string   `key:"container.seccomp_profile" path:"optional" doc:"File with the seccomp profile of pods that request RuntimeDefault. It is read for each container. Empty: the built-in profile."`
	UnsetSeccomp   string   `key:"container.unset_seccomp_profile" default:"unconfined" oneof:"unconfined,runtime/default" doc:"Seccomp profile of containers whose request has none. kubelet always requests one."`
	PauseCPUs      string   `key:"container.pause_cpus" doc:"CPUs on which pause containers run, such as 0-1,4. It has no effect on gVisor, whose sandbox runs all containers of a pod in the cgroup of the pause. Empty: all."`

	MaxExecs          int `key:"exec.max" old:"max_execs" default:"512" min:"1" doc:"Maximum number of commands that run in containers at the same time, probes and exec sessions together. A quarter is reserved for probes and hooks. Each is a process with some MB in berth's cgroup. Further commands fail with ResourceExhausted."`
	MaxContainerExecs int `key:"exec.max_per_container" old:"max_container_execs" default:"128" min:"1" doc:"Maximum number of commands that run in one container at the same time."`

	StreamAddress     string   `key:"stream.address" old:"stream_address" flag:"stream-address" default:"127.0.0.1:0" doc:"IP address and port of exec, attach and port-forward sessions, for kubelet on this node. Port 0: any free port. Addresses other than loopback need stream.tls_cert."`
	StreamPath        string   `key:"stream.path" path:"optional" doc:"Path of the program berth-stream, which has the sessions. Empty: beside the program berthd, else in PATH."`
	StreamTLSCert     string   `key:"stream.tls_cert" old:"stream_tls_cert" path:"optional" doc:"PEM file with the server certificate of sessions. Empty: plain HTTP."`
	StreamTLSKey      string   `key:"stream.tls_key" old:"stream_tls_key" path:"optional" doc:"PEM file with the private key of stream.tls_cert."`
	StreamClientCA    string   `key:"stream.client_ca" old:"stream_client_ca" path:"optional" doc:"PEM file with CA certificates that sign client certificates. Empty: clients need no certificate, only a URL that is valid for one session."`
	StreamIdleTimeout Duration `key:"stream.idle_timeout" old:"stream_idle_timeout" default:"4h" min:"1s" doc:"Limit for a session without traffic. After that it is closed."`
	MaxSessions       int      `key:"stream.max_sessions" old:"max_sessions" default:"4096" min:"1" doc:"Maximum number of attached clients and forwarded connections at the same time. One pod can have half of them."`

	PauseImage      string   `key:"image.pause" old:"pause_image" doc:"Image of the pause container of every pod, pulled like any other image. Empty: the built-in pause program."`
	PinnedImages    []string `key:"image.pinned" old:"pinned_images" reload:"true" doc:"Names of images that kubelet's garbage collection must keep. The pause image is always among them."`
	PreloadDirs     []string `key:"image.preload_dirs" default:"/etc/berth/images.d" path:"abs" doc:"Directories with image archives: OCI layouts and files of docker save, also compressed. Berth loads them at start and when they change, and pins their images. Only root may be able to write the directories. They need not exist."`
	MaxLayerBytes   int      `key:"image.max_layer_bytes" old:"max_layer_bytes" default:"274877906944" min:"1" doc:"Maximum length of a layer's tar, and of the files in it including holes, whatever the size of its blob. Long runs of zeros take no space on disk."`
	MaxLayerEntries int      `key:"image.max_layer_entries" old:"max_layer_entries" default:"4194304" min:"1" doc:"Maximum number of entries in a layer's tar."`
	LayerDriver     string   `key:"image.layer_driver" old:"layer_driver" flag:"layer-driver" default:"auto" oneof:"auto,erofs,directory" doc:"Form of image layers on disk. directory: files and directories. erofs: one data file per layer and one EROFS image per image; needs Linux 6.15 and a disk filesystem. auto: erofs if it works, else directory. See docs/images.md."`
	ImageVolumes    string   `key:"image.volumes" default:"bind" oneof:"bind,ignore" doc:"What a container gets at the paths that its image declares with VOLUME. bind: a directory on disk of its own, with the image's content, removed with the container. ignore: nothing. Existing containers keep their directories."`
	UnpackPath      string   `key:"image.unpack_path" old:"unpack_path" path:"optional" doc:"Path of the program berth-unpack, which unpacks image layers. Empty: beside the program berthd, else in PATH."`

	MaxParallelDownloads int      `key:"pull.max_parallel_downloads" old:"max_parallel_downloads" default:"8" min:"1" doc:"Number of layers of one image that are transferred at the same time."`
	MaxRangeRequests     int      `key:"pull.max_range_requests" old:"max_range_requests" default:"16" min:"0" doc:"Number of parts of large layers that are fetched at the same time, over all pulls, if layers download more slowly than they unpack. Each part takes 4 MiB of memory. 0: each layer is one transfer. See docs/images.md."`
	StallTimeout         Duration `key:"pull.stall_timeout" old:"stall_timeout" default:"1m" min:"1s" doc:"Limit for slow transfers and unpacking. A transfer without a byte for this time, or slower than 8192 bytes a second over this time, fails. So does a layer whose unpacking makes no progress."`
	PullBandwidth        int      `key:"pull.bandwidth" default:"0" min:"0" doc:"Maximum number of bytes that all pulls together receive in a second; at least 1048576. 0: no limit."`
	PullPressureLimit    int      `key:"pull.pressure_limit" default:"20" min:"0" max:"100" doc:"How much longer pods may wait for the disk and for memory during pulls, in percent of time. Beyond that, pulls slow down. It needs cgroup v2 and a kernel that measures pressure (PSI). 0: pulls ignore it. See docs/images.md."`
	PartialLayerTTL      Duration `key:"pull.partial_layer_ttl" default:"24h" min:"0s" doc:"How long layers and received bytes of a failed or cancelled pull are kept. The next pull from the same repository fetches only the rest. 0: they are deleted when the pull ends. See docs/images.md."`

	PeersListen    string   `key:"peers.listen" default:"" doc:"IP address and port where this node serves its layers to other nodes, such as 0.0.0.0:4789. Then pulls ask other nodes for layers before the registry. It needs peers.advertise, peers.cert, peers.key and peers.ca. Empty: layers come from registries only."`
	PeersAdvertise string   `key:"peers.advertise" default:"" doc:"IP address and port of this node for other nodes. It must be among the addresses that peers.seeds of the other nodes have."`
	PeersSeeds     []string `key:"peers.seeds" doc:"HOST:PORT of other nodes. HOST may be a DNS name with the addresses of all nodes. Names are resolved every 30 seconds. All nodes should have the same seeds."`
	PeersCert      string   `key:"peers.cert" path:"optional" doc:"PEM file with this node's certificate for peers, for servers and for clients. Each node should have its own, because uploads are shared among certificates."`
	PeersKey       string   `key:"peers.key" path:"optional" doc:"PEM file with the private key of peers.cert."`
	PeersCA        string   `key:"peers.ca" path:"optional" doc:"PEM file with the certificates of a CA that signs the certificates of nodes and nothing else: each of its certificates can read the layers of all nodes."`
	PeersUploads   int      `key:"peers.max_uploads" default:"8" min:"1" doc:"Number of layers that this node sends at the same time. Further requests wait. One certificate gets at most half of the free uploads."`
	PeersBandwidth int      `key:"peers.upload_bandwidth" default:"0" min:"0" doc:"Maximum number of bytes that this node sends to peers in a second; at least 1048576. 0: no limit."`

	LazyPolicy   string   `key:"lazy.policy" default:"off" oneof:"off,on" doc:"Whether containers can start before their image is complete, see docs/images.md. on: pulls do not wait for layers that can be fetched in parts. Containers of an incomplete image depend on the registry. off: images are complete before use."`
	LazyStall    Duration `key:"lazy.stall" default:"1m" min:"1s" doc:"How long a process waits at most for a part of an incomplete image. After that its read fails with EIO (page faults with SIGBUS). Later reads try again. A quarter of this time is each registry host's limit."`
	LazyMinBytes int      `key:"lazy.min_bytes" default:"33554432" min:"0" doc:"An image is pulled whole if fewer bytes than this could be fetched after the pull."`
	LazyMinTime  Duration `key:"lazy.min_time" default:"2s" min:"0s" doc:"An image is pulled whole if that takes less than this at the speed of recent pulls from the registry. 0: the speed does not matter."`
	LazyMemory   int      `key:"lazy.memory" default:"67108864" min:"1048576" doc:"Memory in bytes of all parts of images that are being fetched after pulls. With a memory limit on berth's cgroup, they use at most an eighth of it."`
	IndexBytes   int      `key:"lazy.index_bytes" default:"0" min:"0" doc:"Limit in bytes of all indexes of blobs. With an index, the next pull of the same blob can be lazy, see docs/images.md. 0: 268435456 with lazy.policy on, else none are kept."`

	RegistryDirs []string `key:"registry.config_dirs" old:"registry_dirs" flag:"registry-dir" default:"/etc/berth/certs.d,/etc/containerd/certs.d" path:"abs" reload:"true" doc:"Directories with one folder per registry host. Each folder holds a hosts.toml in containerd's format: mirrors, CA, client certificates, headers, and redirect_to, which only berth has. The first directory with a folder for the host is used. See docs/images.md."`
	DockerConfig string   `key:"registry.docker_config" old:"docker_config" path:"optional" reload:"true" doc:"File in the format of Docker's config.json, with credentials for pulls without their own. It is searched after registry.auth_files. Empty: none."`
	AuthFiles    []string `key:"registry.auth_files" reload:"true" doc:"Files with credentials for pulls without their own, as in containers-auth.json(5); the first with credentials for the host is used. default stands for the files of podman, docker and kubelet. Every pod can pull with these credentials. See docs/images.md."`

	RegistriesConf string `key:"registry.registries_conf" path:"optional" reload:"true" doc:"File as in containers-registries.conf(5): short names, mirrors, rewritten locations, blocked registries. It decides which hosts serve an image; registry.config_dirs decides how each is reached. Empty: none; short names stand for images of Docker Hub. See docs/images.md."`

	SignaturePolicy        string   `key:"signature.policy" path:"optional" reload:"true" doc:"File as in containers-policy.json(5), such as /etc/containers/policy.json. It decides which images may be pulled and used by containers. It is read for every check. A missing or invalid file rejects all images. Empty: all images are accepted."`
	SignaturePolicyDir     string   `key:"signature.policy_dir" path:"optional" reload:"true" doc:"Directory with policies of namespaces, NAMESPACE.json. A pod in such a namespace is checked by that file instead of signature.policy. Empty: none."`
	SignatureRegistriesDir string   `key:"signature.registries_dir" default:"/etc/containers/registries.d" path:"optional" reload:"true" doc:"Directory with files as in containers-registries.d(5), which name the stores (lookaside) of OpenPGP signatures."`
	SignaturePluginDir     string   `key:"signature.plugin_dir" path:"optional" reload:"true" doc:"Directory of image verifier plugins in containerd's protocol, such as /opt/containerd/image-verifier/bin. Each pull runs all of them; all must accept the image. Empty: none."`
	SignatureMaxPlugins    int      `key:"signature.max_plugins" default:"10" min:"0" reload:"true" doc:"Maximum number of plugins. With more of them in signature.plugin_dir, all pulls fail. containerd ignores the others instead."`
	SignaturePluginTimeout Duration `key:"signature.plugin_timeout" default:"10s" min:"10ms" reload:"true" doc:"Limit for the answer of one plugin. After that the image is rejected."`
	SignatureVerifyPath    string   `key:"signature.verify_path" path:"optional" reload:"true" doc:"Path of the program berth-verify, which checks signatures. Empty: beside the program berthd, else in PATH."`

	CheckpointCRIU    string `key:"checkpoint.criu" path:"optional" doc:"Path of the program criu, 4.1.1 or newer, which checkpoints and restores containers. Empty: found in PATH. Without it only checkpoints and restores fail."`
	CheckpointRestore string `key:"checkpoint.restore" default:"off" oneof:"off,userns,trusted" doc:"Which signed checkpoints CRIU may restore. off: none. userns: those of pods with hostUsers: false, in their user namespace. trusted: all; it trusts their processes with root on the node: read docs/checkpoint.md first. gVisor does not need it."`

	DiskReservePercent    int `key:"disk.reserve_percent" old:"disk_reserve_percent" default:"5" min:"0" max:"90" doc:"Share of the filesystem of images that pulls leave free, in percent of its bytes and of its inodes. A pull that reaches the reserve fails with ResourceExhausted, and its partial layers are deleted. 0: no reserve."`
	DiskReserveBytes      int `key:"disk.reserve_bytes" old:"disk_reserve_bytes" default:"4294967296" min:"0" doc:"Upper limit in bytes of the reserve that disk.reserve_percent sets. The upper limit for inodes is 65536."`
	WritableLayerLimit    int `key:"disk.writable_layer_limit" old:"writable_layer_limit" default:"0" min:"0" doc:"Maximum number of bytes that a container can write into its own filesystem; further writes fail. It needs root mounted with prjquota, otherwise berth does not start. A change applies to containers that start afterwards. 0: no limit. See docs/kubelet.md."`
	WritableLayerProjects int `key:"disk.writable_layer_projects" old:"writable_layer_projects" default:"1073741824" min:"1" max:"3221225471" doc:"First of 1073741824 project IDs for writable layers, where root is mounted with prjquota. IDs are drawn at random. No other program or berth may use them on that filesystem. kubelet uses IDs from 1048577 on. See /etc/projid."`

	Network             string   `key:"network.type" old:"network" flag:"network" default:"cni" oneof:"cni,berth-net" doc:"Network of pods. cni: the network configured in cni.conf_dir; without one, only pods on the host's network run. berth-net: the built-in network, a bridge with addresses, host ports and masquerading. It needs no installation and no further configuration."`
	NetworkBridge       string   `key:"network.bridge" old:"network_bridge" default:"berth0" doc:"Built-in network: name of the bridge."`
	NetworkSubnets      []string `key:"network.subnets" old:"network_subnets" default:"10.83.0.0/16,fdb6:83e7:2d10::/64" doc:"Built-in network: subnets of pod addresses, one for IPv4, one for IPv6, or both. The bridge gets the first address of each. New pods use the node's pod CIDR instead once kubelet has sent it. See docs/network.md."`
	NetworkMTU          int      `key:"network.mtu" old:"network_mtu" default:"0" min:"0" max:"65535" doc:"Built-in network: MTU of pods. 0: MTU of the interface with the default route, read when the bridge is created."`
	NetworkRoutes       []string `key:"network.routes" old:"network_routes" doc:"Built-in network: destinations that pods can reach, such as 10.0.0.0/8. Empty: all."`
	NetworkMasquerade   bool     `key:"network.masquerade" old:"network_masquerade" default:"true" doc:"Built-in network: whether pods appear outside with the node's address."`
	NetworkNoMasquerade []string `key:"network.no_masquerade" old:"network_no_masquerade" doc:"Built-in network: networks that see the pods' own addresses despite masquerading, such as pod networks of other nodes."`
	NetNSDir            string   `key:"network.netns_dir" old:"netns_dir" default:"/run/netns" path:"abs" doc:"Directory of pinned network namespaces of pods, named berth-<pod ID>. The ip tool lists those in /run/netns."`

	CNIConfDir  string   `key:"cni.conf_dir" old:"cni_conf_dir" flag:"cni-conf-dir" default:"/etc/cni/net.d" path:"abs" reload:"true" doc:"Directory of CNI network configurations. The first valid file in lexical order is used. Changes take effect without a restart."`
	CNIBinDirs  []string `key:"cni.bin_dirs" old:"cni_bin_dirs" flag:"cni-bin-dir" default:"/opt/cni/bin,/usr/lib/cni,/usr/libexec/cni" path:"abs" reload:"true" doc:"Directories of CNI plugins, searched in this order. Debian's packages install into /usr/lib/cni, RPMs into /usr/libexec/cni."`
	CNICacheDir string   `key:"cni.cache_dir" old:"cni_cache_dir" path:"optional" doc:"Directory for the CNI library's cache of results. Empty: cni below root."`
	CNITimeout  Duration `key:"cni.timeout" old:"cni_timeout" default:"110s" min:"100ms" doc:"Limit for the plugins of one network to attach or detach a pod. After that they are killed with all their children. The default is below kubelet's two minutes for stopping a pod, so that events name the hanging plugin."`

	CDISpecDirs     []string `key:"devices.cdi_spec_dirs" old:"cdi_spec_dirs" default:"/etc/cdi,/var/run/cdi" path:"abs" doc:"Directories of CDI specifications. If two describe the same device, the last directory wins. They are read for each container that asks for a device. Their content is trusted: hooks run as root."`
	DeviceOwnership bool     `key:"devices.ownership_from_security_context" old:"device_ownership_from_security_context" default:"false" doc:"Whether a container's devices belong to the runAsUser and runAsGroup of its security context, so that a process without root can use them. In pods with a user namespace, devices always keep their owner on the host."`

	NRI                    bool     `key:"nri.enabled" old:"nri" default:"true" doc:"Whether plugins of the Node Resource Interface can observe and change pods and containers. Without plugins it has no cost."`
	NRISocket              string   `key:"nri.socket" old:"nri_socket" default:"/run/berth/nri/nri.sock" path:"optional" doc:"Unix socket for plugins that start by themselves. containerd and CRI-O use /var/run/nri/nri.sock. If another runtime listens on this socket, berth starts with a warning, and no plugin can connect. Empty: only plugins from nri.plugin_dir."`
	NRIPluginDir           string   `key:"nri.plugin_dir" old:"nri_plugin_dir" default:"/opt/nri/plugins" path:"abs" doc:"Directory of plugins that the daemon starts: every program named NN-name. It need not exist."`
	NRIPluginConfigDir     string   `key:"nri.plugin_config_dir" old:"nri_plugin_config_dir" default:"/etc/nri/conf.d" path:"abs" doc:"Directory of these plugins' configuration: the plugin gets NN-name.conf or name.conf."`
	NRIRegistrationTimeout Duration `key:"nri.registration_timeout" old:"nri_registration_timeout" default:"5s" min:"10ms" doc:"Limit for a started or connected plugin to register. After that it is dropped."`
	NRIRequestTimeout      Duration `key:"nri.request_timeout" old:"nri_request_timeout" default:"5s" min:"10ms" reload:"true" doc:"Limit for a plugin's answer. After that the plugin is dropped. Pods go on without it, unless it registered with another failure policy."`
	NRIReject              []string `key:"nri.reject" old:"nri_reject" oneof:"hooks,namespaces,sysctl,seccomp-default,seccomp-custom,seccomp-unconfined" doc:"Adjustments that are forbidden to plugins. Creating a container fails if a plugin makes one. The seccomp values refer to the profile that the container asks for."`
	NRIRequiredPlugins     []string `key:"nri.required_plugins" old:"nri_required_plugins" doc:"Plugins that must be registered before any container is created, static pods included."`

	MetricsAddress string `key:"metrics.address" default:"" reload:"true" doc:"Address that serves Prometheus metrics over HTTP at /metrics, besides debug.sock: IP address and port, like 127.0.0.1:9464, or a unix:// URL of a socket that only root can open. Whoever reaches it can read them. Empty: debug.sock only."`

	MetricsCollectors []string `key:"metrics.collectors" default:"requests,starts,images,lazy,containers,network,daemon,go,process" oneof:"requests,starts,images,lazy,containers,network,daemon,go,process" reload:"true" doc:"Groups of metrics to serve. The group starts has half of all series, requests a quarter. docs/metrics.md lists the metrics of each group. The alerts need requests, images, lazy, containers, network, daemon and process."`

	TracingEndpoint     string `key:"tracing.endpoint" old:"tracing_endpoint" doc:"Host and port of an OpenTelemetry collector. It gets the spans of requests that kubelet traces or that are sampled. Empty: no export. The data of berth trace is recorded in any case."`
	TracingProtocol     string `key:"tracing.protocol" old:"tracing_protocol" default:"grpc" oneof:"grpc,http/protobuf" doc:"Form of OTLP: grpc, usually port 4317, or http/protobuf, usually port 4318 with path /v1/traces."`
	TracingInsecure     bool   `key:"tracing.insecure" old:"tracing_insecure" default:"false" doc:"Whether to talk to the collector without TLS, as kubelet does. It is meant for a collector on this node. Otherwise the collector's certificate is verified."`
	TracingSamplingRate int    `key:"tracing.sampling_rate_per_million" old:"tracing_sampling_rate_per_million" default:"0" min:"0" max:"1000000" doc:"Number of requests without a trace from kubelet that are traced, per million. kubelet decides about its own traces."`

	Handlers map[string]Handler `key:"handlers" example:"crun" reload:"true" doc:"Runtime handler: the name that a RuntimeClass uses as its handler. Without a path it is another name for the built-in handler, berth. A missing program does not stop the daemon; its pods are refused until it is installed."`
}

// Handler is one of the tables [handlers.NAME].
type Handler struct {
	Type string   `key:"type" default:"oci" oneof:"oci,shim" example:"\"oci\"" doc:"What the program at path is: oci, an OCI runtime with runc's command line, or shim, a shim of containerd's task API, such as Kata's."`
	Path string   `key:"path" path:"optional" example:"\"/usr/bin/crun\"" doc:"OCI runtime, such as crun or gVisor's runsc, or a shim, such as /usr/local/bin/containerd-shim-kata-v2. Its features are read. Empty: the built-in runtime."`
	Args []string `key:"args" example:"[\"--debug\"]" doc:"Options in front of every command. berth adds --root, --log, --log-format and --systemd-cgroup by itself."`
	// The name is containerd's.
	WithoutHostDevices bool `key:"privileged_without_host_devices" default:"false" example:"false" doc:"Whether privileged containers get no devices of the host, as with a runtime that runs them in a virtual machine."`

	Options []string `key:"options" example:"[]" doc:"Options of a shim: a list of NAME=VALUE, with the names that containerd's configuration uses. For runc's shim these are BinaryName, Root and others, for all other shims TypeUrl, ConfigPath and ConfigBody."`

	PodAnnotations       []string `key:"pod_annotations" example:"[\"io.katacontainers.*\"]" doc:"Names of annotations of pods that the runtime gets, for the sandbox and for each container; * stands for any characters. Without a list it gets none. Some annotations change what a container may do."`
	ContainerAnnotations []string `key:"container_annotations" example:"[\"io.katacontainers.*\"]" doc:"Names of annotations of containers that the runtime gets, as with pod_annotations. A container's annotation replaces the pod's."`
}

// BuiltinHandler is the name of the built-in runtime handler.
const BuiltinHandler = "berth"

// Default returns the configuration without flags and files.
func Default() *Config {
	c := new(Config)
	for _, o := range options() {
		if err := o.set(fields(c), o.defaults()); err != nil {
			// The struct tags above are wrong. Every test finds this.
			panic(fmt.Sprintf("config: default of %s: %v", o.Key, err))
		}
	}
	return c
}

// fields returns the struct with the top-level options.
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

// Parse parses one configuration file. name is its name in errors. Options that the file lacks have
// their defaults. Parse reports each unknown key with its line and the option with the nearest
// name.
func Parse(name string, content []byte) (*Config, error) {
	var l loading
	l.config = Default()
	if err := l.add(name, content); err != nil {
		return nil, err
	}
	if err := l.config.validate(l.where); err != nil {
		return nil, err
	}
	return l.config, nil
}

// Load returns the configuration. It reads the file that --config names and the file's directory of
// additional files (see [FragmentDir]), and applies the flags registered by AddFlags. The file may
// be missing unless --config was given. The warnings name obsolete keys with their files and lines.
func Load(flags *pflag.FlagSet) (c *Config, warnings []string, err error) {
	name, err := flags.GetString("config")
	if err != nil {
		return nil, nil, err
	}
	l := loading{config: Default()}
	if err := l.addFiles(name, flags.Changed("config")); err != nil {
		return nil, nil, err
	}
	fromFlag, err := applyFlags(flags, l.config)
	if err != nil {
		return nil, nil, err
	}
	err = l.config.validate(func(key string) string {
		if flag, ok := fromFlag[key]; ok {
			return "--" + flag
		}
		return l.where(key)
	})
	if err != nil {
		return nil, nil, err
	}
	return l.config, l.warnings, nil
}

// LoadReported returns the configuration of a running daemon from its verbose Status, which
// includes the daemon's flags. Flags given here take precedence. An option that an older daemon
// does not report has its default.
func LoadReported(flags *pflag.FlagSet, reported []byte) (*Config, error) {
	c := Default()
	if err := json.Unmarshal(reported, c); err != nil {
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

// applyFlags sets the options of the given flags, and returns these flags by key.
func applyFlags(flags *pflag.FlagSet, c *Config) (map[string]string, error) {
	given := make(map[string]string)
	for _, o := range options() {
		f := flags.Lookup(o.Flag)
		if o.Flag == "" || f == nil || !f.Changed {
			continue
		}
		value, ok := f.Value.(*flagValue)
		if !ok {
			return nil, errors.New("--" + o.Flag + " is not a flag of the configuration")
		}
		if err := o.set(fields(c), value.texts); err != nil {
			return nil, fmt.Errorf("--%s: %w", o.Flag, err)
		}
		given[o.Key] = o.Flag
	}
	return given, nil
}
