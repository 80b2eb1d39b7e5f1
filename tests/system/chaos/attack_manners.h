/* attack_manners: the kinds of attackers and the manners of their attacks, which a plan draws. */
#ifndef CHAOS_ATTACK_MANNERS_H
#define CHAOS_ATTACK_MANNERS_H

typedef enum attacker_role {
    ROLE_STRANGER,
    ROLE_EVICTED,
    ROLE_LIAR,
    ROLES,
} attacker_role;

typedef enum stranger_manner {
    STRANGER_SAYS_NOTHING, /* of some bytes; many connections at once, like all of these */
    STRANGER_HALF_OPEN,    /* connects, and is silent */
    STRANGER_HALF_GREETS,
    STRANGER_GREETS_WRONGLY, /* a right greeting, then what is none */
    STRANGER_PLAIN,          /* a whole handshake without keys, then garbage */
    STRANGER_MUTE,           /* a whole handshake, then silence */
    STRANGER_ENDLESS,        /* a whole handshake, then a message without an end */
    STRANGER_CLAIMS_IDS, /* whole handshakes, by routing ids that the trainer may give to others */
    STRANGER_MANNERS,
} stranger_manner;

typedef enum liar_manner {
    LIAR_ANYTHING,      /* any message, at any moment */
    LIAR_NEVER_STAGES,  /* joins and beats */
    LIAR_WRONG_DIGESTS, /* says that it staged, and applied, other bytes */
    LIAR_FUTURE,        /* acknowledges versions that do not exist */
    LIAR_OUT_OF_ORDER,  /* applied before staged, twice, released before applied */
    LIAR_TAKES_BACK,    /* stages at once without having read anything, then fails */
    LIAR_CLAIMS_NAMES,  /* says HELLO in a worker's name */
    LIAR_ABSURD_COUNTS, /* asks for all frames, again and again */
    LIAR_SILENT,        /* joins, and is not heard of any more */
    LIAR_OBSERVES,      /* asks what there is, without end */
    LIAR_MANNERS,
} liar_manner;

#endif
